"""RateLimit: the bytes per second of a copy, and its pauses while something else goes first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from iobench.writers.image import AnyMemory, Bytes, FileImage, WrappedImage

_LOOK_AGAIN_S = 0.02


class StoppedError(Exception):
    """The limit was stopped in the middle of a copy, which goes on later from where it was."""


class RateLimit:
    """Asked before each block of a copy, by any of its threads.

    `rate_bytes_per_s` is a limit on average; None: none. No pause gives credit for more than one
    block. While `busy()`, no block begins, and no time passes for the rate.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        busy: Callable[[], bool] = lambda: False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.stop = threading.Event()
        self._busy, self._clock = busy, clock
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._paid_s = clock()
        """The time at which the blocks so far have ended, at the rate."""
        self._moving = 0
        self.yielded_s = 0.0
        """Seconds for which nothing was moved because of `busy`."""

    def begin(self) -> None:
        """Begin a copy: the time before it, in which nothing was moved, does not count."""
        with self._turn:
            self._paid_s = max(self._paid_s, self._clock())

    def wait(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be moved. Raises StoppedError once `stop` is set."""
        # One thread waits, and the others for it: whoever waits sees a save that begins meanwhile.
        with self._turn:
            rate = self.rate_bytes_per_s
            if rate is not None:
                self._paid_s = max(self._paid_s + size_bytes / rate, self._clock())
            while not self.stop.is_set():
                began_s = self._clock()
                if self._busy():
                    self.stop.wait(_LOOK_AGAIN_S)
                    yielded_s = self._clock() - began_s
                    if not self._moving:
                        self.yielded_s += yielded_s
                    self._paid_s += yielded_s
                elif rate is not None and self._paid_s > began_s:
                    self.stop.wait(min(self._paid_s - began_s, _LOOK_AGAIN_S))
                else:
                    return
        raise StoppedError

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

    def limited(self, image: FileImage) -> FileImage:
        """Return `image`; what a writer takes of it waits for this limit, from now on.

        Writers take blocks in order and write them afterwards. So no I/O path is faster than the
        rate on average. Bytes that are taken again do not wait again.
        """
        self.begin()
        return _LimitedImage(image, _limit=self, _until=[0], _lock=threading.Lock())


class _LimitedImage(WrappedImage):
    _limit: RateLimit
    _until: list[int]
    """Up to where the bytes were taken."""
    _lock: threading.Lock

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        self._wait(start, stop)
        return super().pieces(start, stop)

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        self._wait(start, stop)
        return self._image.gather(start, stop, block)

    def _wait(self, start: int, stop: int) -> None:
        with self._lock:
            new = stop - max(start, self._until[0])
            self._until[0] = max(stop, self._until[0])
        if new > 0:
            self._limit.wait(new)
