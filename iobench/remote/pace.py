"""DrainPace: limits the rate of copies to the remote tier, and lets saves go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["DrainPace", "DrainStoppedError", "pause_after"]

_LOOK_AGAIN_S = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.5, 300.0, 1.5
"""Of the attempts after a failure: an outage is noticed to be over after half of its time more."""


def pause_after(failures: int) -> float:
    """Return the seconds between `failures` failed attempts in a row and the next one."""
    growth = _PAUSE_GROWTH ** min(failures - 1, 40)
    return min(_FIRST_PAUSE_S * growth, _LONGEST_PAUSE_S)


class DrainStoppedError(Exception):
    """The drain was stopped in the middle of a copy, which goes on later from where it was."""


class DrainPace:
    """Asked before each block of a copy, by any of its threads.

    `rate_bytes_per_s` is a limit on average; None: none. While `busy()`, no block begins, and no
    time passes for the rate: the copy goes on from where it was.
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
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._paid_s = 0.0
        """The time at which the blocks so far have ended, at the rate."""
        self._moving = 0
        self.yielded_s = 0.0
        """Seconds for which nothing was moved because of `busy`."""

    def begin(self) -> None:
        """Begin a copy: the time before it, in which nothing was moved, does not count."""
        with self._turn:
            self._paid_s = max(self._paid_s, self._clock())

    def wait(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be moved. Raises DrainStoppedError once `stop` is set."""
        # One thread waits, and the others for it: whoever waits sees a save that begins meanwhile.
        with self._turn:
            if self._rate is not None:
                own_s = size_bytes / self._rate
                self._paid_s = max(self._paid_s + own_s, self._clock())
            while not self.stop.is_set():
                began_s = self._clock()
                if self._busy():
                    self.stop.wait(_LOOK_AGAIN_S)
                    yielded_s = self._clock() - began_s
                    if not self._moving:
                        self.yielded_s += yielded_s
                    self._paid_s += yielded_s
                elif self._paid_s > began_s:
                    self.stop.wait(min(self._paid_s - began_s, _LOOK_AGAIN_S))
                else:
                    return
        raise DrainStoppedError

    @contextmanager
    def moving(self, size_bytes: int) -> Iterator[None]:
        """Wait like `wait`; the body moves the block."""
        self.wait(size_bytes)
        with self._count:
            self._moving += 1
        try:
            yield
        finally:
            with self._count:
                self._moving -= 1
