"""DrainPace: limits the rate of copies to the remote tier, and lets saves go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["DrainPace", "DrainStoppedError"]

_LOOK_AGAIN_S = 0.02


class DrainStoppedError(Exception):
    """The drain was stopped in the middle of a copy, which goes on later from where it was."""


class DrainPace:
    """Asked before each block of a copy, by any of its threads.

    `rate_bytes_per_s` is a limit on average; None: none. While `busy()`, no block begins.
    """

    def __init__(
        self,
        rate_bytes_per_s: int | None,
        busy: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stop = threading.Event()
        self._rate, self._busy, self._clock = rate_bytes_per_s, busy, clock
        self._lock = threading.Lock()
        self._next_s = 0.0
        self.yielded_s = 0.0
        """Seconds for which blocks have waited because of `busy`, added up over threads."""

    def wait(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be moved. Raises DrainStoppedError once `stop` is set."""
        began_s = self._clock()
        while self._busy() and not self.stop.is_set():
            self.stop.wait(_LOOK_AGAIN_S)
            with self._lock:
                self.yielded_s, began_s = self.yielded_s + self._clock() - began_s, self._clock()
        if self._rate is not None:
            with self._lock:
                begin_s = max(self._next_s, self._clock())
                self._next_s = begin_s + size_bytes / self._rate
            self.stop.wait(max(0.0, begin_s - self._clock()))
        if self.stop.is_set():
            raise DrainStoppedError
