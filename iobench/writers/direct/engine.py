"""DirectEngine: moves ranges of files past the page cache, in one thread.

BlockingEngine does it block by block; RingEngine keeps many blocks in flight on an io_uring.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.in_flight import DirectOperation, InFlight, OnComplete, Ring
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import (
    DirectFile,
    aligned_view,
    pread_direct,
    pwrite_direct,
    round_up,
    view_to_fill,
)
from iobench.writers.transfer import Meter


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
                self._start(DirectOperation(file, data, at, len(data), ended), writes=True)

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
                self._start(DirectOperation(file, data, first, end - first, ended), writes=False)

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
    def _start(self, operation: DirectOperation, *, writes: bool) -> None:
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
    """pwrite and preadv in the calling thread."""

    def _start(self, operation: DirectOperation, *, writes: bool) -> None:
        fd, unit = operation.file.fd, operation.file.alignment.offset
        data, offset, wanted, ok = operation.data, operation.offset, operation.wanted, False
        try:
            with self.meter.operation("write" if writes else "read"):
                if writes:
                    calls = pwrite_direct(fd, data, offset, unit)
                else:
                    calls = pread_direct(fd, data, offset, wanted, unit)
            ok = True
        finally:
            operation.on_complete(ok)
        self.meter.count(self._path, wanted, calls)


class RingEngine(DirectEngine):
    """At most `iodepth` pieces are in flight on a ring.

    The device does not wait for copies: a block is filled before a place in the queue is free, and
    copied out after the next piece has started. So one block more than `iodepth` is in use. The
    ring belongs to the calling thread. KeyboardInterrupt must not occur inside, see InFlight.
    """

    def __init__(
        self,
        ring: Ring,
        iodepth: int,
        pool: BlockPool,
        meter: Meter,
        *,
        writes: bool,
        path: str,
    ) -> None:
        super().__init__(pool, meter, path=path)
        self._iodepth = iodepth
        self._in_flight = InFlight(ring, writes=writes, path=path, meter=meter)
        self._read: list[Callable[[], None]] = []
        """Calls `on_complete` of the pieces that were read, which copies them out."""

    def _start(self, operation: DirectOperation, *, writes: bool) -> None:
        ended = operation.on_complete
        if not writes:
            operation.on_complete = lambda ok: self._read.append(functools.partial(ended, ok))
        try:
            while len(self._in_flight) >= self._iodepth:
                self._in_flight.wait_one()
        except BaseException:
            ended(False)
            raise
        self._in_flight.submit(operation)
        self._copy_out()

    def _copy_out(self) -> None:
        while self._read:
            self._read.pop()()

    def __len__(self) -> int:
        return len(self._in_flight)

    def wait_one(self) -> None:
        try:
            self._in_flight.wait_one()
        finally:
            self._copy_out()

    def close(self, failure: BaseException | None = None) -> None:
        try:
            self._in_flight.close(failure)
        finally:
            self._copy_out()
