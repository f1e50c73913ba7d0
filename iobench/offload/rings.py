"""open_any_ring: an io_uring, or threads where the kernel permits none."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import warnings
from collections.abc import Callable

from iobench.errors import UnavailableError
from iobench.writers.blocks.interrupt_safe import Worker
from iobench.writers.direct.uring_queue import Ring, open_ring

__all__ = ["ThreadRing", "open_any_ring", "warn_without_io_uring"]

_MOST_THREADS = 16


def open_any_ring(depth: int) -> Ring:
    """Open a ring for `depth` operations in flight: of io_uring, or of threads without it."""
    try:
        return open_ring(depth)
    except UnavailableError:
        return ThreadRing(depth)


def warn_without_io_uring(depth: int) -> None:
    """Warn if `open_any_ring` takes threads, with the reason and the remedy."""
    try:
        open_ring(depth).close()
    except UnavailableError as error:
        warnings.warn(
            f"{error} Until then {min(depth, _MOST_THREADS)} threads read and write in each "
            "direction, which takes more CPU time.",
            RuntimeWarning,
            stacklevel=4,
        )


class ThreadRing:
    """A Ring of threads that each do one read or write at a time."""

    def __init__(self, depth: int) -> None:
        self._begun: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._threads = [
            Worker(target=self._work, name=f"iobench-offload-io-{number}", daemon=True)
            for number in range(min(depth, _MOST_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put(lambda: self._move(os.pwritev, fd, address, length, offset, tag))

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put(lambda: self._move(os.preadv, fd, address, length, offset, tag))

    def wait(self) -> tuple[int, int]:
        return self._ended.get()

    def peek(self) -> tuple[int, int] | None:
        try:
            return self._ended.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the threads, after all that has begun."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (operation := self._begun.get()) is not None:
            operation()

    def _move(
        self,
        call: Callable[..., int],
        fd: int,
        address: int,
        length: int,
        offset: int,
        tag: int,
    ) -> None:
        memory = (ctypes.c_char * length).from_address(address)  # its user keeps it until the end
        try:
            count = call(fd, [memory], offset)
        except BaseException as error:  # noqa: BLE001 -- a wait for it must not last for ever
            count = -(getattr(error, "errno", None) or errno.EIO)
        self._ended.put((tag, count))
