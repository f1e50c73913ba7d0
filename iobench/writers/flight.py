"""Flight: the operations of one ring on one file, each followed until it is whole."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from iobench.writers.direct_io import read_on, written_on
from iobench.writers.image import Bytes
from iobench.writers.ring import Ring
from iobench.writers.transfer import Meter

__all__ = ["Flight", "Landed"]

_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_PAUSE_S = 0.001
_TRIES = 100  # of an operation that the kernel turns down for the moment, each after a longer pause

Landed = Callable[[bool], None]
"""Called once the kernel has let go of an operation's memory; True when it is whole."""

_lost: list[Any] = []
"""Memory of operations that could not be awaited: kept for ever, as the kernel may still use it."""


class _Operation:
    __slots__ = ("calls", "data", "done", "landed", "offset", "tries", "wanted")

    def __init__(self, data: Bytes, offset: int, wanted: int, landed: Landed) -> None:
        self.data, self.offset, self.wanted, self.landed = data, offset, wanted, landed
        self.done = self.calls = self.tries = 0


class Flight:
    """Writes to one file, or reads from one; used by one thread, and never by two at once.

    As a context manager: whatever is left in flight is awaited before the ring is closed, so that
    nobody frees memory which the kernel still uses. Thus KeyboardInterrupt must not get inside: it
    could come between a completion and its being noted.
    """

    def __init__(
        self, ring: Ring, fd: int, *, writes: bool, alignment: int, path: str, meter: Meter
    ) -> None:
        self._ring, self._fd, self._writes = ring, fd, writes
        self._alignment, self._path, self._meter = alignment, path, meter
        self._operations: dict[int, _Operation] = {}
        self._tag = 0

    def __len__(self) -> int:
        """How many operations are in flight."""
        return len(self._operations)

    def start(self, data: Bytes, offset: int, wanted: int, landed: Landed) -> None:
        """Move `data` to or from `offset`; it belongs to the kernel until `landed` is called.

        Lengths and offsets are multiples of the alignment. A read may want less than it has room
        for: the file may end there. Raises OSError; `landed` was called then too.
        """
        self._tag += 1
        operation = _Operation(data, offset, wanted, landed)
        self._operations[self._tag] = operation
        self._launch(self._tag, operation)

    def land(self) -> None:
        """Wait until one operation is whole. Raises OSError, DataMismatchError."""
        while True:
            with self._meter.phase("wait"):
                tag, count = self._ring.wait()
            if self._completed(tag, count):
                return

    def land_ready(self) -> None:
        """Let all land that the kernel has done with by now. Raises what `land` does."""
        while self._operations and (completion := self._ring.peek()) is not None:
            self._completed(*completion)

    def land_all(self) -> None:
        """Wait until nothing is in flight. Raises what `land` does."""
        while self._operations:
            self.land()

    def _launch(self, tag: int, operation: _Operation) -> None:
        left = operation.data[operation.done :]
        move = self._ring.write if self._writes else self._ring.read
        try:
            with self._meter.phase("submit"):
                move(self._fd, left.ctypes.data, len(left), operation.offset + operation.done, tag)
        except BaseException:
            self._drop(tag)
            raise

    def _completed(self, tag: int, count: int) -> bool:
        """Whether the operation is whole by this completion; otherwise it goes on."""
        operation = self._operations[tag]
        try:
            whole = self._advance(operation, count)
        except BaseException:
            self._drop(tag)
            raise
        if not whole:
            self._launch(tag, operation)
            return False
        del self._operations[tag]
        self._meter.count(self._path, len(operation.data), operation.calls)
        operation.landed(True)
        return True

    def _advance(self, operation: _Operation, count: int) -> bool:
        """Take note of a completion; whether the operation is whole now."""
        operation.calls += 1
        if count < 0:
            self._turned_down(operation, -count)
            return False
        operation.tries = 0
        done, offset = operation.done, operation.offset
        if self._writes:
            operation.done = written_on(done, count, offset, self._alignment)
        else:
            operation.done = read_on(done, count, operation.wanted, offset, self._alignment)
        return operation.done >= operation.wanted

    def _turned_down(self, operation: _Operation, number: int) -> None:
        operation.tries += 1
        if number not in _TRANSIENT or operation.tries > _TRIES:
            raise OSError(number, os.strerror(number))
        self._meter.retries += 1
        time.sleep(_PAUSE_S * (operation.tries - 1))

    def _drop(self, tag: int) -> None:
        self._operations.pop(tag).landed(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Await what is in flight and close the ring; `error` is why it ends early, if it does."""
        try:
            while self._operations:
                tag, _ = self._ring.wait()
                self._drop(tag)
        except BaseException as broken:
            _lost.append(self._operations)
            if error is None:
                raise
            error.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            self._ring.close()
