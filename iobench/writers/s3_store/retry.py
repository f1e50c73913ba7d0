"""RetryPolicy: retries transient failures with growing, random delays."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from iobench.writers.transfer import Meter

__all__ = ["THROTTLED", "RetryPolicy", "Trouble"]

THROTTLED = "throttled"
"""The path under which a Transfer counts answers that ask the client to slow down."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Whether an error is transient, so that a retry may succeed, and whether it is throttling."""

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
        """Return the seconds to wait after that many failures in a row."""
        return self.random() * min(self.cap_s, self.base_s * 2.0 ** (failures - 1))

    def run(
        self,
        call: Callable[[], _T],
        judge: Callable[[Exception], Trouble],
        meter: Meter,
        wait: Callable[[float], bool] | None = None,
    ) -> _T:
        """Return `call()`, and retry it while `judge` calls its error transient.

        `wait(seconds)` returns True if the transfer was cancelled during the wait. Raises the last
        error. The meter counts each retry in `retries` and each throttling as a path.
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
