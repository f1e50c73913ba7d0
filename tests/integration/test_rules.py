"""`iobench run --rules mlperf`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.results import read

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("numjobs", ["1", "2"])
def test_all_saves_then_all_restores(
    iobench_inside: Command, target: Path, tmp_path: Path, numjobs: str
) -> None:
    """Ten checkpoints exist at once, and each restore finds the bytes of its own one."""
    done = iobench_inside(
        *("run", "--target", target, "--rules", "mlperf", "--size", "8MiB"),
        *("--numjobs", numjobs, "-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert record.run.workload.name == "mlperf-8b"
    assert [(one.operation, one.repetition) for one in record.samples] == [
        *(("save", number) for number in range(10)),
        *(("restore", number) for number in range(10)),
    ]
    restored = [one.verified for one in record.samples if one.verified]
    assert [one.mismatches for one in restored] == [0] * 10
    assert "10 saves, then 10 restores of these checkpoints; no claim of being" in done.stderr
    shown = json.loads(iobench_inside("show", tmp_path / "run.jsonl", "--format", "json").stdout)
    assert shown["rules"]["name"] == "mlperf"
    size, processes = shown["rules"]["not_kept"]
    assert size.endswith("of each process")
    assert processes == f"{numjobs} of 8 processes"
    assert f"not kept: {size}; {processes}; no claim of being an official result" in done.stdout
    for one in shown["summaries"]:
        assert one["verdict"] == "VALID (scaled)", one["reasons"]
        assert f"MLPerf Storage v3.0, checkpointing not kept: {processes}" in one["reasons"]
