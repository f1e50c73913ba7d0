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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.checkpoint.staged import LOCK
from iobench.remote.memory_pool import MemoryPool

__all__ = ["HeldSnapshot", "HeldTier", "MemoryStatus", "MemoryStatusFile", "memory_status"]

_NAME = "iobench-memory-tiers"
_PROC = Path("/proc")
_ATTEMPTS, _PAUSE_S = 100, 0.01


@dataclass(frozen=True, kw_only=True)
class HeldTier:
    """A memory tier. `used_bytes` are snapshots that are not written yet.

    `rate_bytes_per_s` was measured when the Checkpointer opened, of memory with a node or path.
    """

    tier: str
    size_bytes: int
    used_bytes: int
    rate_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class HeldSnapshot:
    """A snapshot in memory: not written yet, or `written` and its memory not used again."""

    step: int
    tiers: str
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
    tiers: tuple[HeldTier, ...]
    snapshots: tuple[HeldSnapshot, ...]
    ranks: int = 1

    def lag_s(self, now_s: float) -> float:
        """Return the age of the oldest snapshot that is not written yet; 0 without one."""
        waiting = [one.created_s for one in self.snapshots if not one.written]
        return max(0.0, now_s - min(waiting)) if waiting else 0.0


class MemoryStatusFile:
    """The status of `pool`, which saves to `directory`. `close` removes it.

    `rates` has the measured rate of each tier.
    """

    def __init__(
        self,
        pool: MemoryPool,
        directory: Path,
        rates: Mapping[str, float | None],
        *,
        ranks: int = 1,
    ) -> None:
        self._pool, self._rates, self._directory = pool, rates, _identity(directory)
        self._ranks = ranks
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        self.update()

    def update(self) -> None:
        """Write what the slots hold now. Does nothing after `close` or in a forked child."""
        with self._lock:
            if not self.close.alive or os.getpid() != self._pid:
                return
            body = json.dumps(self._document()).encode()
            os.pwrite(self._fd, b"%08x %d %s" % (zlib.crc32(body), len(body), body), 0)

    def _document(self) -> dict[str, Any]:
        used, snapshots = dict.fromkeys((one.name for one in self._pool.tiers), 0), []
        for slot in self._pool.slots():
            save, parts, written = slot.save, slot.parts, slot.kept is not None
            if save is None or not (slot.busy or written):
                continue
            for part in parts if not written else ():
                used[part.tier] += part.size_bytes
            snapshots.append(
                HeldSnapshot(
                    step=save.step,
                    tiers=" + ".join(part.tier for part in parts),
                    size_bytes=save.size_bytes,
                    created_s=save.created_s,
                    written=written,
                )
            )
        tiers = [
            HeldTier(
                tier=one.name,
                size_bytes=one.size_bytes,
                used_bytes=used[one.name],
                rate_bytes_per_s=self._rates[one.name],
            )
            for one in self._pool.tiers
        ]
        return {
            "directory": self._directory,
            "pid": self._pid,
            "at_s": time.time(),
            "ranks": self._ranks,
            "tiers": [vars(one) for one in tiers],
            "snapshots": [vars(one) for one in snapshots],
        }


def memory_status(directory: Path) -> MemoryStatus | None:
    """Return the memory tiers of the process that saves to `directory`.

    None if there is no such process here: one of this user, on this machine, in this container.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        pid = int(json.loads((directory / LOCK).read_bytes())["pid"])
        for link in (_PROC / str(pid) / "fd").iterdir():
            found = _read(link) if _is_status(link) else None
            if found is not None and found.pop("directory") == _identity(directory):
                return MemoryStatus(
                    pid=found["pid"],
                    at_s=found["at_s"],
                    ranks=found.get("ranks", 1),
                    tiers=tuple(HeldTier(**one) for one in found["tiers"]),
                    snapshots=tuple(HeldSnapshot(**one) for one in found["snapshots"]),
                )
    return None


def _identity(directory: Path) -> list[int]:
    found = directory.stat()
    return [found.st_dev, found.st_ino]


def _is_status(link: Path) -> bool:
    try:
        return os.readlink(link).startswith(f"/memfd:{_NAME} ")
    except OSError:  # closed meanwhile
        return False


def _read(link: Path) -> dict[str, Any] | None:
    """Return the document; None if the file was closed. Reads again while it is written."""
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
                document: dict[str, Any] = json.loads(body)
                return document
        time.sleep(_PAUSE_S)
    return None
