"""Saves that follow each other on a real device, whose limit of writes drops."""

import json
import signal
import subprocess
import sys
import time

import pytest
from support.burst_device import burst_device

from iobench.results import read
from iobench.units import MIB


@pytest.mark.root
def test_burst_credits_end(new_filesystem, tmp_path) -> None:
    """The limit is 24 MiB/s for 2.5 s, and then 4 MiB/s, which any machine reaches. The rates are
    at most those; how near they come is measured in docs/performance.md."""
    target, record = new_filesystem("ext4"), tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "iobench", "run", "--size", "6MiB", "--writer", "odirect"]
    command += ["--target", str(target), "--duration", "12500ms"]
    command += ["--format", "json", "-o", str(record)]
    with burst_device(target) as device:
        done = device.run(command, fast=24 * MIB, slow=4 * MIB, burst_s=2.5)
    assert done.returncode == 0, done.stderr
    save, restore = json.loads(done.stdout)["summaries"]
    change = save["over_time"]["change"]
    assert change is not None, done.stderr
    assert change["after_bytes_per_s"] < 1.1 * 4 * MIB
    assert 2 * change["after_bytes_per_s"] < change["before_bytes_per_s"] < 1.25 * 24 * MIB
    assert (restore["samples"], save["verdict"]) == (1, "VALID (scaled)")
    assert read(record).run.plan["round_s"] == 1.25
    assert not list(target.glob(".iobench*"))


def test_an_interrupted_run_keeps_its_record(tmp_path) -> None:
    """Also one that would go on for an hour: it says what it found until then."""
    target, record = tmp_path / "target", tmp_path / "run.jsonl"
    target.mkdir()
    command = [sys.executable, "-m", "iobench", "run", "--size", "8MiB", "--writer", "odirect"]
    command += ["--target", str(target), "--duration", "1h", "-o", str(record)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        while process.poll() is None and not (
            record.exists() and record.read_text().count('"operation": "save"') > 3
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, errors
    result = read(record)
    assert result.end.status == "interrupted"
    assert "Over time: odirect: " in shown
    assert "GiB written in all at most" in errors
    assert list(target.iterdir()) == []
