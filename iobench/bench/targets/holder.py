"""Holder: which process, of which machine, something in a bucket belongs to."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

__all__ = ["Holder"]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One process, distinguished from a later one with the same process id.

    It replaces the lock that a run holds in a directory, since a bucket has no locks.
    """

    boot: str
    """The running kernel (/proc/sys/kernel/random/boot_id)."""
    pids: str
    """The namespace in which `pid` is a number (/proc/self/ns/pid): containers have their own."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process (field 22 of /proc/PID/stat)."""

    @classmethod
    def ourselves(cls) -> Self:
        """This process."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None
        boot, pids = _here()
        return cls(boot=boot, pids=pids, pid=pid, started=started)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """The holder that `to_bytes` wrote; None for anything else."""
        try:
            found = json.loads(text)
            return cls(
                boot=str(found["boot"]),
                pids=str(found["pids"]),
                pid=int(found["pid"]),
                started=int(found["started"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """As `parse` takes it."""
        return json.dumps(asdict(self)).encode()

    @property
    def dead(self) -> bool:
        """Whether it has ended for certain; False for other machines and containers."""
        return (self.boot, self.pids) == _here() and _started(self.pid) != self.started


def _here() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """When process `pid` started; None where there is none, or one that only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
