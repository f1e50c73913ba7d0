"""Mover: moves aligned memory to or from one file in place, many pieces in flight.

By io_uring, or by threads where the kernel permits none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import warnings
from collections.abc import Callable

from iobench.errors import UnavailableError, transfer_errors
from iobench.offload.files import Speed, StateFile
from iobench.writers.blocks.interrupt_safe import Worker
from iobench.writers.direct.engine import CompletionLatch
from iobench.writers.direct.in_flight import (
    DirectOperation,
    InFlight,
    OnComplete,
    PyuringRing,
    Ring,
)
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.transfer import Meter

_MOST_THREADS = 16


class Mover:
    """Writes to one file, or reads from one, by a ring of its own. Used by one thread.

    Each transfer is cut into pieces of `block_size` bytes, and at most `iodepth` are in flight. The
    kernel moves the memory itself: nothing is copied. `close` waits for all pieces in flight.
    """

    def __init__(self, file: StateFile, speed: Speed, *, writes: bool) -> None:
        self._file, self._speed = file, speed
        self._direct = DirectFile(fd=file.fd, alignment=file.alignment)
        self._doing = "writing" if writes else "reading"
        self._meter = Meter()
        self._in_flight = InFlight(
            _open_any_ring(speed.iodepth), writes=writes, path="io_uring direct", meter=self._meter
        )

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        return len(self._in_flight)

    def start(self, data: Bytes, offset: int, on_complete: OnComplete) -> None:
        """Move `data`, whole blocks, to or from `offset`; returns when the last piece has begun.

        `on_complete` is called when the kernel is done with all of `data`; its argument says
        whether it was moved. Raises TransferError, DataMismatchError, possibly of earlier data.
        """
        with transfer_errors(self._doing, self._file.path), CompletionLatch(on_complete) as latch:
            for begin in range(0, len(data), self._speed.block_size):
                while len(self._in_flight) >= self._speed.iodepth:
                    self._in_flight.wait_one()
                piece = data[begin : begin + self._speed.block_size]
                self._in_flight.submit(
                    DirectOperation(self._direct, piece, offset + begin, len(piece), latch.part())
                )

    def wait_one(self) -> None:
        """Wait until one piece has ended. Raises like `start`."""
        with transfer_errors(self._doing, self._file.path):
            self._in_flight.wait_one()
        self._meter.completed.clear()  # grows with time otherwise

    def drain(self) -> None:
        """Wait until nothing is in flight. Raises like `start`."""
        while len(self):
            self.wait_one()

    def close(self) -> None:
        """Wait for all pieces in flight and close the ring."""
        self._in_flight.close()


def _open_any_ring(depth: int) -> Ring:
    """Open a ring for `depth` operations in flight: of io_uring, or of threads without it."""
    try:
        return PyuringRing(depth)
    except UnavailableError:
        return ThreadRing(depth)


def warn_without_io_uring(depth: int) -> None:
    """Warn if `_open_any_ring` takes threads, with the reason and the remedy."""
    try:
        PyuringRing(depth).close()
    except UnavailableError as error:
        warnings.warn(
            f"{error} Until then {min(depth, _MOST_THREADS)} threads read and write in each "
            "direction, which takes more CPU time.",
            RuntimeWarning,
            stacklevel=4,
        )


_Operation = tuple[Callable[..., int], int, int, int, int, int]
"""A call, and its descriptor, address, length, offset and tag."""


class ThreadRing:
    """A Ring of threads that each do one read or write at a time."""

    def __init__(self, depth: int) -> None:
        self._begun: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._threads = [
            Worker(target=self._work, name=f"iobench-offload-io-{number}", daemon=True)
            for number in range(min(depth, _MOST_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put((os.pwritev, fd, address, length, offset, tag))

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put((os.preadv, fd, address, length, offset, tag))

    def wait(self) -> tuple[int, int]:
        return self._ended.get()

    def close(self) -> None:
        """End the threads, after all that has begun."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (operation := self._begun.get()) is not None:
            call, fd, address, length, offset, tag = operation
            memory = (ctypes.c_char * length).from_address(address)  # its user keeps it
            try:
                count = call(fd, [memory], offset)
            except BaseException as error:  # noqa: BLE001 -- a wait for it must not last for ever
                count = -(getattr(error, "errno", None) or errno.EIO)
            self._ended.put((tag, count))
