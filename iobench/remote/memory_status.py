"""MemoryStatus: the use of memory tiers by the process that saves to a directory.

The process writes it to an anonymous file (memfd) after every change. Others find the process by
the lock of the directory, and the file in /proc/PID/fd. The kernel removes the file with the
process, so nothing is left behind by a kill, and no status outlives the memory that it describes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from iobench.remote.memory_pool import MemoryPool, TierUse
from iobench.writers.local.directory_lock import LOCK

_NAME = "iobench-memory-tiers"
_PROC = Path("/proc")
_ATTEMPTS, _PAUSE_S = 100, 0.01


@dataclass(frozen=True, kw_only=True)
class HeldSnapshot:
    """A snapshot in memory: not written yet, or `written` and its memory not used again."""

    step: int
    tier: str
    size_bytes: int
    created_s: float
    written: bool


@dataclass(frozen=True, kw_only=True)
class MemoryStatus:
    """The memory tiers of process `pid`, at `at_s` seconds since the epoch, its last change.

    It is rank 0 of `ranks`: the others have memory of their own, which is not shown.
    """

    pid: int
    at_s: float
    tiers: tuple[TierUse, ...]
    snapshots: tuple[HeldSnapshot, ...]
    ranks: int = 1

    def backlog_s(self, now_s: float) -> float:
        """Return the age of the oldest snapshot that is not written yet; 0 without one."""
        waiting = [one.created_s for one in self.snapshots if not one.written]
        return max(0.0, now_s - min(waiting)) if waiting else 0.0


class MemoryStatusFile:
    """The status of `pool`, which saves to `directory`. `close` removes it."""

    def __init__(self, pool: MemoryPool, directory: Path, *, ranks: int = 1) -> None:
        self._pool, self._directory, self._ranks = pool, _identity(directory), ranks
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        self.update()

    def update(self) -> None:
        """Write what the slots hold now. Does nothing after `close` or in a forked child."""
        with self._lock:
            if not self.close.alive or os.getpid() != self._pid:
                return
            body = msgspec.json.encode((self._directory, self._status()))
            os.pwrite(self._fd, b"%08x %d %s" % (zlib.crc32(body), len(body), body), 0)

    def _status(self) -> MemoryStatus:
        return MemoryStatus(
            pid=self._pid,
            at_s=time.time(),
            ranks=self._ranks,
            tiers=self._pool.use(),
            snapshots=tuple(
                HeldSnapshot(
                    step=save.step,
                    tier=slot.tier,
                    size_bytes=save.size_bytes,
                    created_s=save.created_s,
                    written=slot.kept is not None,
                )
                for slot in self._pool.slots()
                if (save := slot.save) is not None and (slot.busy or slot.kept is not None)
            ),
        )


def memory_status(directory: Path) -> MemoryStatus | None:
    """Return the memory tiers of the process that saves to `directory`.

    None if there is no such process here: one of this user, on this machine, in this container.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        pid = int(json.loads((directory / LOCK).read_bytes())["pid"])
        for link in (_PROC / str(pid) / "fd").iterdir():
            found = _read(link) if _is_status(link) else None
            if found is not None and found[0] == _identity(directory):
                return found[1]
    return None


def _identity(directory: Path) -> tuple[int, int]:
    found = directory.stat()
    return found.st_dev, found.st_ino


def _is_status(link: Path) -> bool:
    try:
        return os.readlink(link).startswith(f"/memfd:{_NAME} ")
    except OSError:  # closed meanwhile
        return False


def _read(link: Path) -> tuple[tuple[int, int], MemoryStatus] | None:
    """Return the directory and its status; None if the file was closed.

    Reads again while it is written.
    """
    for _ in range(_ATTEMPTS):
        try:
            text = link.read_bytes()
        except OSError:
            return None
        checksum, _, rest = text.partition(b" ")
        size, _, body = rest.partition(b" ")
        with contextlib.suppress(ValueError):
            body = body[: int(size)]
            if int(checksum, 16) == zlib.crc32(body):
                return msgspec.json.decode(body, type=tuple[tuple[int, int], MemoryStatus])
        time.sleep(_PAUSE_S)
    return None
