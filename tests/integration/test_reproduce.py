"""`iobench reproduce` as a user calls it: measured on a real file system, and from records."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def test_hybrid_io_is_measured_and_judged_again(
    iobench: Command, target: Path, tmp_path: Path
) -> None:
    """Every claim gets an answer; the records it left give the same answers again."""
    done = iobench(
        *("reproduce", "hybrid-io", "--target", target, "--size", "64MiB", "--repeat", "1"),
        *("--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "iobench.findings/1"
    assert os.listdir(target) == []
    found = document["findings"]
    assert [(one["claim"]["workload"], one["claim"]["operation"]) for one in found] == [
        (workload, operation)
        for workload in ("llama7b", "gpt5b-nemo")
        for operation in ("save", "restore", None)
    ]
    assert all(one["reason"] and one["setting"] for one in found)
    assert {one["answer"] for one in found} <= {"undecided", "not comparable"}  # by one pair
    records = document["records"]
    assert len(records) == 2
    again = [part for record in records for part in ("--results", record)]
    assert (
        json.loads(iobench("reproduce", "hybrid-io", *again, "--format", "json").stdout) == document
    )
    table = iobench("reproduce", "hybrid-io", *again).stdout
    assert "hybrid over buffered" in table
    assert (
        "| llama7b | writes 1.7x |"
        in iobench(*("reproduce", "hybrid-io", *again, "--format", "md")).stdout
    )


def test_claims_that_are_not_known_are_refused(iobench: Command) -> None:
    done = iobench("reproduce", "pccheck")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "iobench: unknown claim 'pccheck' Known: hybrid-io.\n"
