"""Iodepth: how many operations a ring may have in flight, as asked or as measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from iobench.units import GIB, MIB

__all__ = ["Iodepth", "MeasuredIodepth"]


class Iodepth:
    """So many operations, always."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most

    def landed(self, size_bytes: int) -> None:
        """So much has been moved since the last call."""

    def disturbed(self) -> None:
        """Something else than these operations has taken time."""


class MeasuredIodepth(Iodepth):
    """`most` operations in flight, or a quarter of them, whichever moves more bytes just now.

    Many hide a long latency. Few keep staging blocks in the processor's cache between the device
    and the copy, which is faster once the latency is short; and it changes from one second to the
    next (docs/decisions/0036). So both are measured, one right after the other, and again after a
    while, which grows with each trial that changes nothing. The one in use is measured for longer,
    as that costs nothing and many in flight end in bursts; the trial is short.
    """

    STRETCH_BYTES, TRIAL_BYTES = 96 * MIB, 48 * MIB
    SKIPPED_BYTES = 32 * MIB
    """Not measured, while the ring comes to its new depth."""
    FIRST_WAIT_BYTES, LAST_WAIT_BYTES = 4 * GIB, 16 * GIB
    FASTER = 1.05
    """By so much the trial must be faster for its depth to stay."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(most)
        self._clock = clock
        self._other = max(1, most // 4)
        self._rate = 0.0
        """Bytes per second of the depth in use, just before the trial that runs; else 0."""
        self._wait = self.FIRST_WAIT_BYTES
        self._began: float | None = None
        self._moved, self._goal = 0, self.SKIPPED_BYTES

    def landed(self, size_bytes: int) -> None:
        self._moved += size_bytes
        if self._moved < self._goal or self.now == self._other:
            return
        now = self._clock()
        if self._began is None:
            self._began, self._moved = now, 0
            self._goal = self.TRIAL_BYTES if self._rate else self.STRETCH_BYTES
        elif now > self._began:
            self._measured(self._moved / (now - self._began))

    def disturbed(self) -> None:
        if self._began is not None:
            self._measure_after(self.SKIPPED_BYTES)

    def _measured(self, rate: float) -> None:
        before, self._rate = self._rate, 0.0 if self._rate else rate
        if before and rate > self.FASTER * before:
            self._wait = self.FIRST_WAIT_BYTES
            self._measure_after(self._wait)
            return
        self.now, self._other = self._other, self.now
        if before:
            self._measure_after(self._wait)
            self._wait = min(2 * self._wait, self.LAST_WAIT_BYTES)
        else:
            self._measure_after(self.SKIPPED_BYTES)

    def _measure_after(self, size_bytes: int) -> None:
        self._began, self._moved, self._goal = None, 0, size_bytes
