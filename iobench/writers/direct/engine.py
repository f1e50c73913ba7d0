"""DirectEngine: moves ranges of files past the page cache, in one thread.

BlockingEngine does it block by block; RingEngine keeps many blocks in flight on an io_uring.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Self

from iobench.errors import transfer_errors
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.ring import Ring
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import (
    DirectFile,
    aligned_view,
    read_on,
    round_up,
    view_to_fill,
    written_on,
)
from iobench.writers.local.posix import pread_all, pwrite_all
from iobench.writers.transfer import Meter

OnComplete = Callable[[bool], None]
"""Completion callback: called once, when the kernel is done with the memory.

Its argument is True if all bytes were moved; only then it may raise. It is never called when the
ring failed: the kernel may still use the memory, which is lost.
"""

_lost: list[Bytes] = []
"""Memory of operations that cannot be awaited: never freed, as the kernel may still use it."""


@dataclass(slots=True, eq=False)
class DirectOperation:
    """Moves `data` to or from `offset` of `file`. The kernel uses `data` until `on_complete`.

    Lengths and offsets are multiples of the alignment. A read may want fewer bytes than `data` has,
    as the file may end there.
    """

    file: DirectFile
    data: Bytes
    offset: int
    wanted: int
    on_complete: OnComplete
    writes: bool
    tag: int = 0
    done: int = 0
    calls: int = 0
    tries: int = 0
    began_s: float = 0.0

    @property
    def name(self) -> str:
        """The phase of a Transfer in which it is counted."""
        return "write" if self.writes else "read"


def ignore(_ok: bool) -> None:
    """No-op completion callback."""


class CompletionLatch:
    """Calls `on_complete` once the `with` block and every part that was added in it have ended.

    It passes True if all of them succeeded. If a part never ends, it is never called.
    """

    __slots__ = ("_left", "_ok", "_on_complete")

    def __init__(self, on_complete: OnComplete) -> None:
        self._left, self._ok, self._on_complete = 1, True, on_complete

    def part(self) -> OnComplete:
        """Wait for one more part; return what ends it, and takes whether it succeeded."""
        self._left += 1
        return self._end

    def _end(self, ok: bool) -> None:
        self._left -= 1
        self._ok &= ok
        if not self._left:
            self._on_complete(self._ok)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kind is None)


class DirectEngine(ABC):
    """Moves ranges between images and files. Used by one thread.

    A range is cut into pieces, each as large as a block of `pool`. A piece whose memory has the
    alignment that the device needs is moved in place. A write gathers any other piece into a block,
    a read copies it out of a block once it is complete.

    Ranges begin at multiples of the file's alignment. `on_complete` is called once for each range,
    when the kernel is done with its memory, also when `write` or `read` raises. It is never called
    after a ring failed, see OnComplete. The end of a `with` waits for all operations in flight, so
    that no memory is freed while the kernel uses it. Operations are counted in `meter` as `path`.
    """

    def __init__(self, pool: BlockPool, meter: Meter, *, path: str) -> None:
        self._pool, self.meter, self._path = pool, meter, path

    def write(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        """Write `part`; padding may follow it. Raises OSError, possibly of an earlier range."""
        (image, start, stop, offset), size = part, self._pool.block_size
        whole = aligned_view(part, file.alignment)
        with CompletionLatch(on_complete) as latch:
            for begin in range(start, stop, size):
                end, at = min(begin + size, stop), offset + begin - start
                if whole is not None:
                    data, ended = whole[begin - start : end - start], latch.part()
                else:
                    block = self._pool.take()
                    try:
                        with self.meter.phase("gather"):
                            image.gather(begin, end, block)
                    except BaseException:
                        self._pool.give(block)
                        raise
                    data = block[: round_up(end - begin, file.alignment.offset)]
                    ended = self._with_block(block, latch.part())
                self.start(DirectOperation(file, data, at, len(data), ended, writes=True))

    def read(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        """Fill `part`. Raises OSError or DataMismatchError, possibly of an earlier range."""
        (image, start, stop, offset), size = part, self._pool.block_size
        with CompletionLatch(on_complete) as latch:
            for first in range(offset, stop, size):
                begin, end = max(first, start), min(first + size, stop)
                piece = Extent(image, begin, end, first)
                data = view_to_fill(piece, file.alignment) if begin == first else None
                if data is not None:
                    ended = latch.part()
                else:
                    block = self._pool.take()
                    data = block[: round_up(end - first, file.alignment.offset)]
                    copy_out = functools.partial(image.scatter, begin, end, block[begin - first :])
                    ended = self._with_block(block, latch.part(), copy_out)
                self.start(DirectOperation(file, data, first, end - first, ended, writes=False))

    def _with_block(
        self, block: Bytes, ended: OnComplete, copy_out: Callable[[], object] | None = None
    ) -> OnComplete:
        """Return the callback of a piece in `block`: it copies out what was read, and gives the
        block back."""

        def complete(ok: bool) -> None:
            copied = False
            try:
                if ok and copy_out is not None:
                    with self.meter.phase("scatter"):
                        copy_out()
                copied = ok
            finally:
                self._pool.give(block)
                ended(copied)

        return complete

    @abstractmethod
    def start(self, operation: DirectOperation) -> None:
        """Move one piece, now or later. Its `on_complete` is called also when this raises."""

    def __len__(self) -> int:
        """Return the number of operations in flight."""
        return 0

    def wait_one(self) -> None:
        """Wait until one operation has ended. Raises its failure.

        Also after a failure one fewer is in flight. After a failure of the ring itself, none is.
        """
        raise AssertionError("nothing is in flight")

    def drain(self) -> None:
        """Wait until nothing is in flight, then raise the first failure."""
        failure: Exception | None = None
        while len(self):
            try:
                self.wait_one()
            except Exception as error:  # noqa: BLE001 -- raised below
                failure = failure or error
        if failure:
            raise failure

    def close(self, failure: BaseException | None = None) -> None:  # noqa: B027 -- a ring closes
        """Wait for all operations in flight and close; `failure` is the reason, if there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


class BlockingEngine(DirectEngine):
    """pwritev and preadv in the calling thread."""

    def start(self, operation: DirectOperation) -> None:
        ok = False
        try:
            with self.meter.operation(operation.name):
                calls = self._move(operation)
            ok = True
        finally:
            operation.on_complete(ok)
        self.meter.count(self._path, operation.wanted, calls)

    def _move(self, operation: DirectOperation) -> int:
        """Move all of it; return the number of calls."""
        (fd, alignment, _), views, offset = operation.file, [operation.data], operation.offset
        if operation.writes:
            return pwrite_all(fd, views, offset, unit=alignment.offset)
        return pread_all(fd, views, offset, wanted=operation.wanted, unit=alignment.offset)


_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_PAUSE_S = 0.001
_TRIES = 100  # of an operation that fails with a transient error; each retry waits longer


class RingEngine(DirectEngine):
    """At most `iodepth` pieces are in flight on a ring, each continued to its end.

    The device does not wait for copies: a block is filled before a place in the queue is free, and
    copied out after the next piece has started. So one block more than `iodepth` is in use.

    After the ring itself failed, nothing is in flight any more, and the memory is lost. The ring
    belongs to the calling thread. KeyboardInterrupt must not occur inside: it could come between a
    completion and the line that records it.
    """

    def __init__(
        self, ring: Ring, iodepth: int, pool: BlockPool, meter: Meter, *, path: str
    ) -> None:
        super().__init__(pool, meter, path=path)
        self._ring, self._iodepth = ring, iodepth
        # By tag, as io_uring completes them in any order.
        self._operations: dict[int, DirectOperation] = {}
        self._tag = 0
        self._read: list[Callable[[], None]] = []
        """Calls `on_complete` of the pieces that were read, which copies them out."""

    def __len__(self) -> int:
        return len(self._operations)

    def start(self, operation: DirectOperation) -> None:
        """Move one piece later. If its file has a name, the errors of the piece are TransferErrors
        with this name, whichever call raises them.
        """
        try:
            while len(self._operations) >= self._iodepth:
                self._complete_one()
        except BaseException:
            operation.on_complete(False)
            raise
        self._tag += 1
        operation.tag, operation.began_s = self._tag, time.perf_counter()
        self._operations[self._tag] = operation
        self._submit(operation)
        self._copy_out()

    def wait_one(self) -> None:
        try:
            self._complete_one()
        finally:
            self._copy_out()

    def close(self, failure: BaseException | None = None) -> None:
        try:
            while self._operations:
                tag, _ = self._wait()
                self._end(self._operations[tag], ok=False)
        except BaseException as broken:
            if failure is None:
                raise
            failure.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            try:
                self._ring.close()
            finally:
                self._copy_out()

    def _copy_out(self) -> None:
        while self._read:
            self._read.pop()()

    def _submit(self, operation: DirectOperation) -> None:
        """Start `operation`, or the rest of one that io_uring completed in part."""
        left, offset = operation.data[operation.done :], operation.offset + operation.done
        move = self._ring.write if operation.writes else self._ring.read
        try:
            with self.meter.phase("submit"):
                move(operation.file.fd, left.ctypes.data, len(left), offset, operation.tag)
        except OSError as error:
            self._fail(operation, error)
        except BaseException:  # out of memory, before or after the kernel took the operation
            _lost.append(self._operations.pop(operation.tag).data)
            raise

    def _complete_one(self) -> None:
        """Wait until one operation is complete. Raises OSError, DataMismatchError."""
        name = next(iter(self._operations.values())).name  # all write, or all read
        while True:
            with self.meter.phase(name):
                tag, count = self._wait()
            operation = self._operations[tag]
            try:
                complete = self._advance(operation, count)
            except BaseException as error:  # noqa: BLE001 -- raised by `_fail`
                self._fail(operation, error)
            if complete:
                self.meter.took(name, time.perf_counter() - operation.began_s)
                self.meter.count(self._path, len(operation.data), operation.calls)
                self._end(operation, ok=True)
                return
            self._submit(operation)

    def _advance(self, operation: DirectOperation, count: int) -> bool:
        """Record a completion; return whether the operation is complete."""
        operation.calls += 1
        if count < 0:  # memory is short, or the kernel's own worker was interrupted
            operation.tries += 1
            if -count not in _TRANSIENT or operation.tries > _TRIES:
                raise OSError(-count, os.strerror(-count))
            self.meter.retries += 1
            time.sleep(_PAUSE_S * (operation.tries - 1))
            return False
        operation.tries = 0
        moved_on = written_on if operation.writes else read_on
        done, wanted, unit = operation.done, operation.wanted, operation.file.alignment.offset
        operation.done = moved_on(done, count, wanted, operation.offset, unit)
        return operation.done >= operation.wanted

    def _fail(self, operation: DirectOperation, error: BaseException) -> NoReturn:
        self._end(operation, ok=False)
        if not operation.file.name:
            raise error
        with transfer_errors("writing" if operation.writes else "reading", operation.file.name):
            raise error

    def _end(self, operation: DirectOperation, *, ok: bool) -> None:
        del self._operations[operation.tag]
        if operation.writes:
            operation.on_complete(ok)
        else:
            self._read.append(functools.partial(operation.on_complete, ok))

    def _wait(self) -> tuple[int, int]:
        """Return the next completion. After an error the memory in flight is never freed."""
        try:
            return self._ring.wait()
        except BaseException:
            _lost.extend(operation.data for operation in self._operations.values())
            self._operations.clear()
            raise
