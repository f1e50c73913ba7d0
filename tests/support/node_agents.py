"""The memory agents of nodes: found by their command line, killed, and their memory damaged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["agents_of", "flip_memory", "kill_agent", "kill_agents", "memory_files"]

_PROGRAM = "iobench.replicas.agent"


def agents_of(running: Mapping[int, str]) -> list[int]:
    """Return the pids of the agents among processes and their command lines."""
    return [pid for pid, line in running.items() if _PROGRAM in line]


def kill_agents() -> None:
    """Kill the agents of the node on which this process runs; return when they have ended."""
    running = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            running[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
    for pid in agents_of(running):
        kill_agent(pid)


def kill_agent(pid: int) -> None:
    """Kill an agent; return when it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while _runs(pid):
        time.sleep(0.002)


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie has none
    return False


def memory_files(agent: int) -> list[Path]:
    """Return the open memory files of an agent."""
    found = []
    for file in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(OSError):
            if "iobench-replica" in os.readlink(file):
                found.append(file)
    return found


def flip_memory(agent: int) -> int:
    """Flip a bit in the middle of every memory file of an agent; return how many there are."""
    files = memory_files(agent)
    for file in files:
        fd = os.open(file, os.O_RDWR)
        try:
            at = os.fstat(fd).st_size // 2
            (byte,) = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte ^ 1]), at)
        finally:
            os.close(fd)
    return len(files)
