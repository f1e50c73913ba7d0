"""The phases of a save by each file writer add up to its time, on storage that is slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iobench.testing import content
from iobench.units import MIB
from iobench.writers.direct.in_flight import PyuringRing
from iobench.writers.image import FileImage
from iobench.writers.registry import make

_ATTEMPTS = 5  # another process may run between two lines of one
_SLOW_S = 0.02


def _slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(_SLOW_S)
        return call(*arguments, **options)

    return slow


@pytest.mark.parametrize("name", ["buffered", "uncached", "odirect", "uring", "hybrid", "aiofiles"])
def test_a_save_by_each_file_writer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow storage, at least 95% of a save belongs to a phase, and no second to two."""
    writer = make(name, block_size=MIB)
    if not writer.available(tmp_path).ok:
        pytest.skip(writer.available(tmp_path).reason)
    for call in ("pwrite", "pwritev", "fsync", "ftruncate", "replace"):
        monkeypatch.setattr(os, call, _slowed(getattr(os, call)))
    for call in ("write", "wait", "peek"):
        monkeypatch.setattr(PyuringRing, call, _slowed(getattr(PyuringRing, call)))
    shares = []
    for number in range(_ATTEMPTS):
        image = FileImage.of(f"file-{number}", [content(8 * MIB + 5)])
        saved = writer.write_many([image], tmp_path)
        shares.append(sum(saved.phases_s.values()) / saved.elapsed_s)
    assert max(shares) >= 0.95
    assert max(shares) <= 1.001
