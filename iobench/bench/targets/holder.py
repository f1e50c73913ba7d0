"""Holder: identifies the process and machine that an object in a bucket belongs to."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One process, distinguished from a later one with the same process id.

    It replaces the lock that a run holds in a directory, since a bucket has no locks.
    """

    boot: str
    """The running kernel (/proc/sys/kernel/random/boot_id)."""
    pids: str
    """The PID namespace of `pid` (/proc/self/ns/pid); each container has its own."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process (field 22 of /proc/PID/stat)."""

    @classmethod
    def ourselves(cls) -> Self:
        """Return the holder for this process."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None
        boot, pids = _here()
        return cls(boot=boot, pids=pids, pid=pid, started=started)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the holder that `to_bytes` wrote; None for any other text."""
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
        """Return the bytes that `parse` accepts."""
        return json.dumps(asdict(self)).encode()

    @property
    def dead(self) -> bool:
        """Whether it has ended for certain; False for other machines and containers."""
        return (self.boot, self.pids) == _here() and _started(self.pid) != self.started


def _here() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """Return the start of process `pid`; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
