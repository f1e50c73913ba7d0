"""TokenBucket: limits the rate of bytes that several threads send together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["TokenBucket"]


class TokenBucket:
    """Lets `rate_bytes_per_s` pass on average, and no burst longer than `burst_s` of it.

    Each `take` books its bytes and then sleeps until they are due. So threads share the rate in the
    order of their calls. A rate of None is no limit.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        *,
        burst_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._burst_s, self._clock, self._sleep = burst_s, clock, sleep
        self._lock = threading.Lock()
        self._due_s = clock()

    @property
    def unit_bytes(self) -> int | None:
        """Bytes to take at once: what the rate gives in `burst_s`, at least 16 KiB; None: all."""
        rate = self.rate_bytes_per_s
        return None if rate is None else max(16 * 1024, int(rate * self._burst_s))

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be sent."""
        rate = self.rate_bytes_per_s
        if rate is None:
            return
        with self._lock:
            begin_s = max(self._due_s, self._clock() - self._burst_s)
            self._due_s = begin_s + size_bytes / rate
            early_s = self._due_s - self._clock()
        if early_s > 0:
            self._sleep(early_s)
