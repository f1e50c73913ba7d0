"""PathPolicy: chooses the path of each operation of the `hybrid` writer, with a reason.

MemoryPressure: whether writes should currently avoid the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import parse_meminfo
from iobench.units import MIB

_INTERVAL_S = 0.25
_SHORT_PART = 0.05
_SHORT_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """One reading. All zeros, when nothing can be read, means no pressure."""

    total_bytes: int = 0
    available_bytes: int = 0
    dirty_bytes: int = 0
    """Dirty pages and pages under write-back, of the whole machine."""
    throttle_bytes: int = 0
    """The number of dirty bytes above which the kernel slows writers down."""

    @property
    def reason(self) -> str:
        """Why writes should avoid the page cache; empty when they need not."""
        if self.available_bytes < max(_SHORT_PART * self.total_bytes, _SHORT_BYTES):
            return "memory is short" if self.total_bytes else ""
        if self.throttle_bytes and self.dirty_bytes > self.throttle_bytes:
            return "much is dirty"
        return ""


class MemoryPressure:
    """Reads /proc/meminfo and the dirty limits, about every `interval_s`; thread-safe.

    There is no lock, as a signal handler that saves may run at any point. Two threads may read at
    the same time.

    The kernel slows writers down above the mean of the background limit and the dirty limit
    (dirty_freerun_ceiling in mm/page-writeback.c). Ratios are of available memory.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._interval_s, self._clock = proc, interval_s, clock
        self._last = float("-inf"), Pressure()
        """The time of the last reading, and the reading."""

    def now(self) -> Pressure:
        """Return the last reading; read again when it is older than the interval."""
        read_at_s, pressure = self._last
        now = self._clock()
        if now - read_at_s >= self._interval_s:
            pressure = self._read()
            self._last = now, pressure
        return pressure

    def _read(self) -> Pressure:
        facts = parse_meminfo(read_text(self._proc / "meminfo") or "")
        available = facts.get("MemAvailable", 0)
        if not available:
            return Pressure()
        limits = self._limit("dirty", available), self._limit("dirty_background", available)
        return Pressure(
            total_bytes=facts.get("MemTotal", 0),
            available_bytes=available,
            dirty_bytes=facts.get("Dirty", 0) + facts.get("Writeback", 0),
            throttle_bytes=sum(limits) // 2,
        )

    def _limit(self, name: str, available: int) -> int:
        fixed = read_int(self._proc / "sys/vm" / f"{name}_bytes")
        if fixed:
            return fixed
        return (read_int(self._proc / "sys/vm" / f"{name}_ratio") or 0) * available // 100


class IoPath(StrEnum):
    """The paths between memory and storage."""

    DIRECT = "direct"
    """O_DIRECT: past the page cache, with the least CPU time, for aligned blocks only."""
    UNCACHED = "uncached"
    """Through the page cache. On return the bytes are on storage and their pages are dropped."""
    BUFFERED = "buffered"
    """Through the page cache, which keeps the bytes."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The path, and the reason in a few words; equal situations have equal reasons."""

    path: IoPath
    reason: str


class PathPolicy:
    """Chooses among `paths` for the operations of one transfer. Thread-safe and reentrant: a signal
    handler that saves may run at any point.

    Small operations go through the page cache: a direct write of a few KiB waits for the device on
    its own, while write-back combines it with others. Large operations go past the cache, by
    O_DIRECT where it works. Trying the other path now and then was no faster (docs/decisions/0020).
    """

    def __init__(
        self, paths: Sequence[IoPath] = tuple(IoPath), *, small_size: int, read_soon: bool = False
    ) -> None:
        """Operations below `small_size` bytes are small. `paths` is not empty; large operations
        prefer its first entries."""
        assert paths
        self._paths = tuple(paths)
        self._small_size, self._read_soon = small_size, read_soon

    def choose(
        self,
        size_bytes: int,
        pressure: Pressure = Pressure(),
        *,
        aligned: bool = True,
        in_cache: bool = False,
    ) -> Decision:
        """Choose the path of one operation.

        `aligned` describes its offset and length. `in_cache` says of a read that the page cache has
        all bytes.
        """
        paths, pressed = self._paths, pressure.reason
        if in_cache and IoPath.BUFFERED in paths:
            return Decision(path=IoPath.BUFFERED, reason="in the page cache")
        if size_bytes < self._small_size:
            if pressed:
                return _first(paths, f"small, {pressed}", IoPath.UNCACHED, IoPath.BUFFERED)
            return _first(paths, "small", IoPath.BUFFERED, IoPath.UNCACHED)
        if self._read_soon and not pressed and IoPath.BUFFERED in paths:
            return Decision(path=IoPath.BUFFERED, reason="read soon")
        if not aligned:
            return _first(paths, "unaligned", IoPath.UNCACHED, IoPath.BUFFERED)
        path = next((one for one in paths if one != IoPath.BUFFERED), IoPath.BUFFERED)
        reason = f"large, {pressed}" if self._read_soon and pressed else "large"
        return Decision(path=path, reason=reason)

    def has(self, path: IoPath) -> bool:
        """Whether `path` may still be chosen."""
        return path in self._paths

    def drop(self, path: IoPath) -> None:
        """Stop using `path`, which does not work. The last one stays."""
        self._paths = tuple(one for one in self._paths if one != path) or self._paths


def _first(paths: Sequence[IoPath], reason: str, *wanted: IoPath) -> Decision:
    path = next((path for path in wanted if path in paths), paths[0])
    return Decision(path=path, reason=reason)
