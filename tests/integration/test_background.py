"""`iobench run --background none,restore`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from iobench.results import read

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def test_saves_next_to_restores(
    iobench_inside: Command, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """Alone and next to another process, which restores all the time and finds the right bytes; a
    peer too. The answer has both rates, and nothing stays."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", "odirect,peer:torch-save"),
        *("--background", "none,restore", "--repeat", "2", "--size", "full", "--no-fio"),
        *("-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert {one.bytes for one in record.samples} == {record.run.workload.bytes}
    readers = {"odirect": "odirect", "peer:torch-save": "buffered"}
    for one in record.samples:
        found = one.background_restores
        if one.axes.background is None:
            assert found is None
            continue
        assert found is not None
        assert (found.writer, found.error, found.mismatches) == (readers[one.writer], "", 0)
        assert found.lead_s > 0
        assert found.lag_s > 0
        assert found.bytes > 0
        assert 0 < found.reading_s <= one.elapsed_s + 1e-6
    shown = iobench_inside("show", tmp_path / "run.jsonl", "--format", "json")
    summaries = json.loads(shown.stdout)["summaries"]
    assert len(summaries) == 8
    for one in summaries:
        assert ("background_rates" in one) == ("background" in one)
        assert one["verdict"] in ("VALID", "NOT PROVED"), one["reasons"]
        if one["verdict"] == "VALID" and "background" in one:
            assert one["background_rates"]["kept"] == one["ratio"]
    if any(one["verdict"] == "VALID" and "background" in one for one in summaries):
        assert "while another process restores at" in done.stdout
    assert "times no background" in " ".join(done.stdout.split())
