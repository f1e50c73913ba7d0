"""InFlight: the operations of one ring, each continued until it is complete."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from iobench.errors import IobenchError, TransferError
from iobench.writers.direct.uring_queue import Ring
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.local.direct_io import read_on, written_on
from iobench.writers.transfer import Meter

__all__ = ["InFlight", "OnComplete", "RingOperation"]

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


class RingOperation:
    """Moves `data` to or from `offset` of `file`. The kernel uses `data` until `on_complete`.

    Lengths and offsets are multiples of the alignment. A read may want fewer bytes than `data` has,
    as the file may end there.
    """

    __slots__ = (
        *("began_s", "calls", "data", "done", "file"),
        *("offset", "on_complete", "tag", "tries", "wanted"),
    )

    def __init__(
        self, file: DirectFile, data: Bytes, offset: int, wanted: int, on_complete: OnComplete
    ) -> None:
        self.file, self.data, self.offset = file, data, offset
        self.wanted, self.on_complete = wanted, on_complete
        self.tag = self.done = self.calls = self.tries = 0
        self.began_s = time.perf_counter()


class InFlight:
    """Writes to files, or reads from files. Used by one thread.

    `close` waits for all operations in flight, then closes the ring: no memory is freed while the
    kernel uses it. After the ring itself failed, nothing is in flight any more, and the memory is
    lost. KeyboardInterrupt must not occur inside: it could come between a completion and the line
    that records it.
    """

    def __init__(self, ring: Ring, *, writes: bool, path: str, meter: Meter) -> None:
        self._ring, self._writes, self._path, self._meter = ring, writes, path, meter
        self._name, self._doing = ("write", "writing") if writes else ("read", "reading")
        self._operations: dict[
            int, RingOperation
        ] = {}  # by tag: io_uring completes them in any order
        self._tag = 0

    def __len__(self) -> int:
        """Return the number of operations in flight."""
        return len(self._operations)

    def start(
        self, file: DirectFile, data: Bytes, offset: int, wanted: int, on_complete: OnComplete
    ) -> None:
        """Start an RingOperation. Raises OSError; `on_complete` has been called then too.

        If `file` has a name, the error of its operation is a TransferError with this name,
        whichever call raises it.
        """
        self.submit(RingOperation(file, data, offset, wanted, on_complete))

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

    def submit(self, operation: RingOperation) -> None:
        """Start `operation`, or the rest of one that io_uring completed in part; see `start`."""
        if not operation.tag:
            self._tag += 1
            operation.tag = self._tag
            self._operations[self._tag] = operation
        left, offset = operation.data[operation.done :], operation.offset + operation.done
        move = self._ring.write if self._writes else self._ring.read
        try:
            with self._meter.phase("submit"):
                move(operation.file.fd, left.ctypes.data, len(left), offset, operation.tag)
        except OSError as error:
            self._end(operation, ok=False)
            self._raise(error, operation)
        except BaseException:  # out of memory, before or after the kernel took the operation
            _lost.append(self._operations.pop(operation.tag).data)
            raise

    def _take_completion(self, tag: int, count: int) -> bool:
        """Return whether the operation is complete; otherwise submit the rest of it."""
        operation = self._operations[tag]
        try:
            complete = self._advance(operation, count)
        except BaseException as error:  # noqa: BLE001 -- raised by `_raise`
            self._end(operation, ok=False)
            self._raise(error, operation)
        if complete:
            self._meter.took(self._name, time.perf_counter() - operation.began_s)
            self._meter.count(self._path, len(operation.data), operation.calls)
            self._end(operation, ok=True)
        else:
            self.submit(operation)
        return complete

    def _advance(self, operation: RingOperation, count: int) -> bool:
        """Record a completion; return whether the operation is complete."""
        operation.calls += 1
        if count < 0:
            self._before_retry(operation, -count)
            return False
        operation.tries = 0
        done, offset, unit = operation.done, operation.offset, operation.file.alignment.offset
        if self._writes:
            operation.done = written_on(done, count, offset, unit)
        else:
            operation.done = read_on(done, count, operation.wanted, offset, unit)
        return operation.done >= operation.wanted

    def _before_retry(self, operation: RingOperation, number: int) -> None:
        """Pause after the transient error `number`; raise OSError for any other one.

        The kernel returns transient errors when memory is short or its own worker is interrupted.
        """
        operation.tries += 1
        if number not in _TRANSIENT or operation.tries > _TRIES:
            raise OSError(number, os.strerror(number))
        self._meter.retries += 1
        time.sleep(_PAUSE_S * (operation.tries - 1))

    def _raise(self, error: BaseException, operation: RingOperation) -> NoReturn:
        name = operation.file.name
        if name and isinstance(error, OSError) and not isinstance(error, IobenchError):
            raise TransferError.wrap(error, self._doing, name) from error
        raise error

    def _end(self, operation: RingOperation, *, ok: bool) -> None:
        del self._operations[operation.tag]
        operation.on_complete(ok)

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
                self._end(self._operations[tag], ok=False)
        except BaseException as broken:
            self._keep_memory()
            if error is None:
                raise
            error.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            self._ring.close()
