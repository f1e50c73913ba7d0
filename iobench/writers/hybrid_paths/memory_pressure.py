"""MemoryPressure: whether writes should currently avoid the page cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import parse_meminfo
from iobench.units import MIB

__all__ = ["MemoryPressure", "Pressure"]

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
