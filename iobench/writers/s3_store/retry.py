"""RetryPolicy: what failed for a moment is tried again, later each time and not all at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from iobench.writers.transfer import Meter

__all__ = ["THROTTLED", "RetryPolicy", "Trouble"]

THROTTLED = "throttled"
"""The path under which a Transfer counts answers that asked to slow down."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What an error means for trying again."""

    transient: bool
    throttled: bool = False


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter: before retry n, 0 to `base_s` * 2^(n-1), capped.

    Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    max_attempts: int
    base_s: float = 0.1
    cap_s: float = 20.0
    random: Callable[[], float] = field(default=random.random)

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        return self.random() * min(self.cap_s, self.base_s * 2.0 ** (failures - 1))

    def run(
        self,
        call: Callable[[], _T],
        judge: Callable[[Exception], Trouble],
        meter: Meter,
        wait: Callable[[float], bool] | None = None,
    ) -> _T:
        """What `call()` gives; it is repeated while `judge` says that its error is transient.

        `wait(seconds)` returns True when the transfer was given up meanwhile. Raises the last
        error. Every repetition counts in the meter's retries, every throttling as a path.
        """
        wait = threading.Event().wait if wait is None else wait
        failures = 0
        while True:
            try:
                return call()
            except Exception as error:
                trouble = judge(error)
                if trouble.throttled:
                    meter.count(THROTTLED, 0)
                failures += 1
                if not trouble.transient or failures >= self.max_attempts:
                    raise
                if wait(self.delay_s(failures)):
                    raise
                meter.retries += 1
