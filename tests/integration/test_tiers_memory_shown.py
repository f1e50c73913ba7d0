"""`iobench tiers DIR` shows the memory tiers of the process that saves there."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from iobench import Checkpointer, Memory
from iobench.remote.memory_status import MemoryStatusFile, memory_status
from iobench.units import MIB
from iobench.writers.local.directory_lock import LOCK

_SAVER = """
import sys, threading
import torch
from iobench import Checkpointer, Memory
from iobench.writers.buffered import BufferedWriter

class Gated(BufferedWriter):
    gate = threading.Event()
    def write_many(self, *given, **options):
        self.gate.wait()
        return super().write_many(*given, **options)

tiers = [Memory("9MiB"), Memory("32MiB", path="/dev/shm")]
ckpt = Checkpointer(sys.argv[1], writer=Gated(), tiers=tiers)
for step in (1, 2):
    ckpt.save_async({"w": torch.full((2 << 20,), float(step))}, step)
print("held", flush=True)
sys.stdin.readline()
Gated.gate.set()
ckpt.wait()
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs at /dev/shm")
def test_memory_of_a_process(tmp_path, iobench_inside) -> None:
    """Fill, backlog and snapshots, before and after the writes; nothing after a kill -9."""

    run = tmp_path / "run"

    def shown() -> Any:
        return json.loads(iobench_inside("tiers", run, "--format", "json").stdout)["memory"]

    command = [sys.executable, "-c", _SAVER, str(run)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "held\n"
            held = shown()
            assert held["pid"] == process.pid
            assert all(8 * MIB < one["used_bytes"] < 9 * MIB for one in held["tiers"])
            assert [one["tier"] for one in held["snapshots"]] == ["memory", "memory of /dev/shm"]
            assert [(one["step"], one["written"]) for one in held["snapshots"]] == [
                (1, False),
                (2, False),
            ]
            assert held["backlog_s"] > 0
            text = iobench_inside("tiers", run).stdout
            assert f"of process {process.pid}" in text
            assert "lost: 2 snapshots that memory alone has\n" in text
            assert "volatile, memory of /dev/shm\n" in text
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "written\n"
            written = shown()
            assert [one["used_bytes"] for one in written["tiers"]] == [0, 0]
            assert [one["written"] for one in written["snapshots"]] == [True, True]
            assert written["backlog_s"] == 0
        finally:
            process.send_signal(signal.SIGKILL)
    assert memory_status(run) is None
    assert sorted(one.name for one in run.iterdir()) == [LOCK, "step-1", "step-2"]
    refused = iobench_inside("tiers", run)
    assert refused.returncode != 0
    assert "no process of this user here holds memory" in refused.stderr


def test_closed(tmp_path) -> None:
    """A process that goes on without its Checkpointer has no status; nor has another directory."""
    run, other = tmp_path / "run", tmp_path / "other"
    with Checkpointer(run, tiers=[Memory("16MiB")]) as ckpt:
        other.mkdir()
        (other / LOCK).write_bytes((run / LOCK).read_bytes())
        ckpt.save_async({"w": torch.ones(4)}, 1)
        ckpt.wait()
        found = memory_status(run)
        assert [(one.step, one.written) for one in found.snapshots] == [(1, True)]
        assert memory_status(other) is None
        if (child := os.fork()) == 0:  # shares the file, but not the memory
            try:
                ckpt._persister.pool.changed()  # type: ignore[attr-defined]  # MemoryPool
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert memory_status(run) == found
    assert memory_status(run) is None


def test_read_while_it_is_written(tmp_path) -> None:
    """Every status that is read is one that was written as a whole."""
    snapshots: list[Any] = []
    pool: Any = SimpleNamespace(slots=lambda: list(snapshots), use=tuple)
    (tmp_path / LOCK).write_text(json.dumps({"pid": os.getpid()}))
    status, ended = MemoryStatusFile(pool, tmp_path), threading.Event()

    def write() -> None:
        for number in range(10**9):
            count = number % 50
            save = SimpleNamespace(step=count, size_bytes=1, created_s=1.0)
            slot = SimpleNamespace(save=save, tier="memory", kept=None, busy=True)
            snapshots[:] = [slot] * count
            status.update()
            if ended.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            found = memory_status(tmp_path)
            assert {one.step for one in found.snapshots} <= {len(found.snapshots)}
    finally:
        ended.set()
        writer.join()
        status.close()
