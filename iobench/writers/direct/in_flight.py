"""InFlight: the operations of one ring on one file, each continued until it is complete."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

from iobench.writers.direct.uring_queue import Ring
from iobench.writers.image import Bytes
from iobench.writers.local.direct_io import read_on, written_on
from iobench.writers.transfer import Meter

__all__ = ["InFlight", "OnComplete"]

_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_PAUSE_S = 0.001
_TRIES = 100  # of an operation that fails with a transient error; each retry waits longer

_T = TypeVar("_T")

OnComplete = Callable[[bool], None]
"""Completion callback: called once, when the kernel is done with the memory. Must not raise.

Its argument is True if all bytes were moved. It is never called when the ring failed: the kernel
may still use the memory, which is lost.
"""

_lost: list[Bytes] = []
"""Memory of operations that cannot be awaited: never freed, as the kernel may still use it."""


class _Operation:
    __slots__ = ("began_s", "calls", "data", "done", "offset", "on_complete", "tries", "wanted")

    def __init__(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        self.data, self.offset, self.wanted, self.on_complete = data, offset, wanted, on_complete
        self.done = self.calls = self.tries = 0
        self.began_s = time.perf_counter()


class InFlight:
    """Writes to one file, or reads from one. Used by one thread.

    `close` waits for all operations in flight, then closes the ring: no memory is freed while the
    kernel uses it. After the ring itself failed, nothing is in flight any more, and the memory is
    lost. KeyboardInterrupt must not occur inside: it could come between a completion and the line
    that records it.
    """

    def __init__(
        self, ring: Ring, fd: int, *, writes: bool, alignment: int, path: str, meter: Meter
    ) -> None:
        self._ring, self._fd, self._writes = ring, fd, writes
        self._alignment, self._path, self._meter = alignment, path, meter
        self._name = "write" if writes else "read"
        self._operations: dict[int, _Operation] = {}  # by tag: io_uring completes them in any order
        self._tag = 0

    def __len__(self) -> int:
        """Return the number of operations in flight."""
        return len(self._operations)

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        """Move `data` to or from `offset`. The kernel uses `data` until `on_complete` is called.

        Lengths and offsets are multiples of the alignment. A read may want fewer bytes than `data`
        has, as the file may end there. Raises OSError; `on_complete` has been called then too.
        """
        self._tag += 1
        self._operations[self._tag] = _Operation(data, offset, wanted, on_complete)
        self._submit(self._tag)

    def wait_one(self) -> None:
        """Wait until one operation is complete. Raises OSError, DataMismatchError."""
        while True:
            with self._meter.phase(self._name):
                tag, count = self._call_ring(self._ring.wait)
            if self._take_completion(tag, count):
                return

    def reap(self) -> None:
        """Take the completions that are available now. Raises like `wait_one`."""
        while self._operations:
            # A peek enters the kernel, which completes operations in it.
            with self._meter.phase(self._name):
                completion = self._call_ring(self._ring.peek)
            if completion is None:
                return
            self._take_completion(*completion)

    def _submit(self, tag: int) -> None:
        operation = self._operations[tag]
        # io_uring may complete an operation in part; the rest is submitted as another one.
        left = operation.data[operation.done :]
        move = self._ring.write if self._writes else self._ring.read
        try:
            with self._meter.phase("submit"):
                move(self._fd, left.ctypes.data, len(left), operation.offset + operation.done, tag)
        except OSError:
            self._end(tag, ok=False)
            raise
        except BaseException:  # out of memory, before or after the kernel took the operation
            _lost.append(self._operations.pop(tag).data)
            raise

    def _take_completion(self, tag: int, count: int) -> bool:
        """Return whether the operation is complete; otherwise submit the rest of it."""
        operation = self._operations[tag]
        try:
            complete = self._advance(operation, count)
        except BaseException:
            self._end(tag, ok=False)
            raise
        if complete:
            self._meter.took(self._name, time.perf_counter() - operation.began_s)
            self._meter.count(self._path, len(operation.data), operation.calls)
            self._end(tag, ok=True)
        else:
            self._submit(tag)
        return complete

    def _advance(self, operation: _Operation, count: int) -> bool:
        """Record a completion; return whether the operation is complete."""
        operation.calls += 1
        if count < 0:
            self._before_retry(operation, -count)
            return False
        operation.tries = 0
        done, offset = operation.done, operation.offset
        if self._writes:
            operation.done = written_on(done, count, offset, self._alignment)
        else:
            operation.done = read_on(done, count, operation.wanted, offset, self._alignment)
        return operation.done >= operation.wanted

    def _before_retry(self, operation: _Operation, number: int) -> None:
        """Pause after the transient error `number`; raise OSError for any other one.

        The kernel returns transient errors when memory is short or its own worker is interrupted.
        """
        operation.tries += 1
        if number not in _TRANSIENT or operation.tries > _TRIES:
            raise OSError(number, os.strerror(number))
        self._meter.retries += 1
        time.sleep(_PAUSE_S * (operation.tries - 1))

    def _end(self, tag: int, *, ok: bool) -> None:
        self._operations.pop(tag).on_complete(ok)

    def _call_ring(self, call: Callable[[], _T]) -> _T:
        """Return the result of `call`. After an error of the ring nothing can be awaited."""
        try:
            return call()
        except BaseException:
            self._keep_memory()
            raise

    def _keep_memory(self) -> None:
        """Never free the memory of operations in flight: they cannot be awaited."""
        _lost.extend(operation.data for operation in self._operations.values())
        self._operations.clear()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for all operations in flight and close the ring; `error` is why it ends early."""
        try:
            while self._operations:
                tag, _ = self._call_ring(self._ring.wait)
                self._end(tag, ok=False)
        except BaseException as broken:
            self._keep_memory()
            if error is None:
                raise
            error.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            self._ring.close()
