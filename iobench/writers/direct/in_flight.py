"""InFlight: the operations of one ring on one file, each followed until it is whole."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from iobench.writers.direct.uring_queue import Ring
from iobench.writers.image import Bytes
from iobench.writers.local.direct_io import read_on, written_on
from iobench.writers.transfer import Meter

__all__ = ["InFlight", "OnComplete"]

_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_PAUSE_S = 0.001
_TRIES = 100  # of an operation that the kernel turns down for the moment, each after a longer pause

_T = TypeVar("_T")

OnComplete = Callable[[bool], None]
"""Called once, when the kernel is done with the memory; True if all was moved. Must not raise.

Never called when the ring failed: the kernel may still use the memory, which is lost.
"""

_lost: list[Bytes] = []
"""Memory of operations that could not be awaited: kept for ever, as the kernel may still use it."""


class _Operation:
    __slots__ = ("calls", "data", "done", "offset", "on_complete", "tries", "wanted")

    def __init__(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        self.data, self.offset, self.wanted, self.on_complete = data, offset, wanted, on_complete
        self.done = self.calls = self.tries = 0


class InFlight:
    """Writes to one file, or reads from one; used by one thread, and never by two at once.

    As a context manager: whatever is left in flight is awaited before the ring is closed, so that
    nothing frees memory which the kernel still uses. When the ring itself fails nothing is in
    flight any more, and the memory is lost. KeyboardInterrupt must not get inside: it could come
    between a completion and its being noted.
    """

    def __init__(
        self, ring: Ring, fd: int, *, writes: bool, alignment: int, path: str, meter: Meter
    ) -> None:
        self._ring, self._fd, self._writes = ring, fd, writes
        self._alignment, self._path, self._meter = alignment, path, meter
        self._operations: dict[int, _Operation] = {}  # io_uring ends them in any order, by tag
        self._tag = 0

    def __len__(self) -> int:
        """How many operations are in flight."""
        return len(self._operations)

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        """Move `data` to or from `offset`; it belongs to the kernel until `on_complete` is called.

        Lengths and offsets are multiples of the alignment. A read may want less than it has room
        for: the file may end there. Raises OSError; `on_complete` was called then too.
        """
        self._tag += 1
        self._operations[self._tag] = _Operation(data, offset, wanted, on_complete)
        self._launch(self._tag)

    def wait_one(self) -> None:
        """Wait until one operation is whole. Raises OSError, DataMismatchError."""
        while True:
            with self._meter.phase("wait"):
                tag, count = self._ask(self._ring.wait)
            if self._take(tag, count):
                return

    def reap(self) -> None:
        """Take what the kernel is done with by now. Raises what `wait_one` does."""
        while self._operations and (completion := self._ask(self._ring.peek)) is not None:
            self._take(*completion)

    def drain(self) -> None:
        """Wait until nothing is in flight. Raises what `wait_one` does."""
        while self._operations:
            self.wait_one()

    def _launch(self, tag: int) -> None:
        operation = self._operations[tag]
        left = operation.data[operation.done :]
        move = self._ring.write if self._writes else self._ring.read
        try:
            with self._meter.phase("submit"):
                move(self._fd, left.ctypes.data, len(left), operation.offset + operation.done, tag)
        except OSError:
            self._end(tag, ok=False)
            raise
        except BaseException:  # out of memory: before the kernel had it, or after
            _lost.append(self._operations.pop(tag).data)
            raise

    def _take(self, tag: int, count: int) -> bool:
        """Whether the operation is whole by this completion; otherwise it goes on."""
        operation = self._operations[tag]
        try:
            whole = self._advance(operation, count)
        except BaseException:
            self._end(tag, ok=False)
            raise
        if whole:
            self._meter.count(self._path, len(operation.data), operation.calls)
            self._end(tag, ok=True)
        else:
            self._launch(tag)
        return whole

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
        """The kernel did not make it: short of memory, or its own worker was interrupted."""
        operation.tries += 1
        if number not in _TRANSIENT or operation.tries > _TRIES:
            raise OSError(number, os.strerror(number))
        self._meter.retries += 1
        time.sleep(_PAUSE_S * (operation.tries - 1))

    def _end(self, tag: int, *, ok: bool) -> None:
        self._operations.pop(tag).on_complete(ok)

    def _ask(self, ring: Callable[[], _T]) -> _T:
        """What the ring answers. After an error of its own nothing can be awaited any more."""
        try:
            return ring()
        except BaseException:
            self._lose()
            raise

    def _lose(self) -> None:
        """Keep the memory of what is in flight for ever: it cannot be awaited."""
        _lost.extend(operation.data for operation in self._operations.values())
        self._operations.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Await what is in flight and close the ring; `error` is why it ends early, if it does."""
        try:
            while self._operations:
                tag, _ = self._ask(self._ring.wait)
                self._end(tag, ok=False)
        except BaseException as broken:
            self._lose()
            if error is None:
                raise
            error.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            self._ring.close()
