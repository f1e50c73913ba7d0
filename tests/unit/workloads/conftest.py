"""Published figures, and small models, for the workload tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench import workloads
from iobench.workloads import Workload


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a workload file and returns its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def small() -> Callable[..., Workload]:
    """The named workload on a model a thousand times smaller, its layout's fields replaced."""

    def make(name: str, *, layers: int = 4, vocabulary: int = 96, **fields: Any) -> Workload:
        workload = workloads.load(name)
        arch = replace(
            workload.model.arch,
            vocab_size=vocabulary,
            hidden_size=48,
            num_layers=layers,
            num_heads=8,
            ffn_hidden_size=112,
        )
        if arch.num_kv_heads:
            arch = replace(arch, num_kv_heads=2)
        if arch.max_positions:
            arch = replace(arch, max_positions=24)
        return replace(
            workload,
            model=replace(workload.model, arch=arch),
            layout=replace(workload.layout, **fields),
        )

    return make
