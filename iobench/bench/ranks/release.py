"""The common release: all ranks begin an operation at one moment, which rank 0 chooses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Lead", "wait_until"]

_SPIN_S = 0.0005  # a sleep ends later than it should


def wait_until(
    at_s: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> float:
    """Return at `at_s` of time.perf_counter; the result is the seconds by which that is too late.

    The last half millisecond is spent in a loop: a sleep ends when the scheduler finds the time.
    """
    while (left_s := at_s - clock()) > _SPIN_S:
        sleep(left_s - _SPIN_S)
    while (now_s := clock()) < at_s:
        pass
    return max(0.0, now_s - at_s)


@dataclass(kw_only=True)
class Lead:
    """How long before the release its time is sent; longer after a rank got it too late."""

    seconds: float = 0.02
    longest_s: float = 5.0
    tolerated_s: float = 0.002

    def began(self, late_s: float) -> None:
        """Adapt to the lateness of the last rank."""
        if late_s > self.tolerated_s:
            self.seconds = min(2 * self.seconds + late_s, self.longest_s)
