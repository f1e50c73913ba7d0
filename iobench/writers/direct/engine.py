"""DirectEngine: moves ranges of files past the page cache, in one thread.

BlockingEngine does it block by block; RingEngine keeps many blocks in flight on an io_uring.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.in_flight import InFlight, OnComplete, Ring, RingOperation
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

    def add(self) -> None:
        """Wait for one more part."""
        self._left += 1

    def end(self, ok: bool) -> None:
        """End one part; `ok` says whether it succeeded."""
        self._left -= 1
        self._ok &= ok
        if not self._left:
            self._on_complete(self._ok)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(kind is None)


class DirectEngine(ABC):
    """Moves ranges between images and files. Used by one thread.

    Ranges begin at multiples of the file's alignment. `on_complete` is called once for each range,
    when the kernel is done with its memory, also when `write` or `read` raises. It is never called
    after a ring failed, see OnComplete. The end of a `with` waits for all operations in flight, so
    that no memory is freed while the kernel uses it. Operations are counted in `meter` as `path`.
    """

    def __init__(self, pool: BlockPool, meter: Meter, *, path: str) -> None:
        self._pool, self.meter, self._path = pool, meter, path

    @abstractmethod
    def write(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        """Write `part`; padding may follow it. Raises OSError, possibly of an earlier range."""

    @abstractmethod
    def read(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        """Fill `part`. Raises OSError or DataMismatchError, possibly of an earlier range."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of operations in flight."""

    @abstractmethod
    def wait_one(self) -> None:
        """Wait until one operation has ended. Raises its failure.

        Also after a failure one fewer is in flight. After a failure of the ring itself, none is.
        """

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

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Wait for all operations in flight and close; `failure` is the reason, if there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


class BlockingEngine(DirectEngine):
    """pwrite and preadv in the calling thread. Blocks of `pool` are as large as the ranges."""

    def write(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        unit = file.alignment.offset
        with CompletionLatch(on_complete):
            with contextlib.ExitStack() as held:
                data = aligned_view(part, file.alignment)
                if data is None:
                    block = held.enter_context(self._pool.block())
                    with self.meter.phase("gather"):
                        part.image.gather(part.start, part.stop, block)
                    data = block[: round_up(part.size_bytes, unit)]
                with self.meter.operation("write"):
                    calls = pwrite_direct(file.fd, data, part.offset, unit)
            self.meter.count(self._path, len(data), calls)

    def read(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        image, start, stop, begin = part
        unit = file.alignment.offset
        with CompletionLatch(on_complete):
            data = view_to_fill(part, file.alignment) if start == begin else None
            if data is not None:
                with self.meter.operation("read"):
                    calls = pread_direct(file.fd, data, begin, stop - begin, unit)
            else:
                with self._pool.block() as room:
                    block = room[: round_up(stop - begin, unit)]
                    with self.meter.operation("read"):
                        calls = pread_direct(file.fd, block, begin, stop - begin, unit)
                    with self.meter.phase("scatter"):
                        image.scatter(start, stop, block[start - begin :])
            self.meter.count(self._path, stop - begin, calls)

    def __len__(self) -> int:
        return 0

    def wait_one(self) -> None:
        raise AssertionError("nothing is ever in flight")

    def close(self, failure: BaseException | None = None) -> None:
        pass


def most_pieces(iodepth: int) -> int:
    """Return the pieces of one engine: those in flight, and those being copied."""
    return iodepth + max(1, iodepth // 4)


class _Piece(RingOperation):
    """One operation of a range. The latch of the range ends it once it is moved and copied."""

    __slots__ = ("block", "copy_out", "engine")

    def __init__(
        self,
        engine: RingEngine,
        file: DirectFile,
        latch: CompletionLatch,
        data: Bytes,
        offset: int,
        wanted: int,
        block: Bytes | None = None,
        copy_out: Callable[[], object] | None = None,
    ) -> None:
        """`block` of the pool holds `data`; None: `data` is memory of the image.

        `copy_out` copies a block that was read to the image.
        """
        super().__init__(file, data, offset, wanted, latch.end)
        self.engine, self.block, self.copy_out = engine, block, copy_out

    def ended(self, ok: bool) -> None:
        if ok and self.copy_out is not None:
            self.engine._to_copy.append(self)
        else:
            self.finish(ok)

    def finish(self, ok: bool) -> None:
        """Give the block back and call `on_complete`."""
        if self.block is not None:
            self.engine._pool.give(self.block)
        super().ended(ok)


class RingEngine(DirectEngine):
    """Moves ranges in pieces, each as large as a block of `pool`; at most `iodepth` are in flight.

    The device does not wait for copies. A write copies a piece into its block before a place in the
    queue is free. A read first starts the next piece and then copies the completed one out. 25%
    more pieces than `iodepth` are enough for that, as memory is faster than the device
    (docs/decisions/0010).

    `write` and `read` return when a further piece may be made. The ring belongs to the calling
    thread. KeyboardInterrupt must not occur inside, see InFlight.
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
        self._due: deque[_Piece] = deque()
        self._to_copy: deque[_Piece] = deque()

    def write(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        (image, start, stop, offset), size = part, self._pool.block_size
        whole = aligned_view(part, file.alignment)
        pieces = (
            Extent(image, begin, min(begin + size, stop), offset + begin - start)
            for begin in range(start, stop, size)
        )

        def put(latch: CompletionLatch, piece: Extent) -> _Piece:
            if whole is not None:
                data = whole[piece.start - start : piece.stop - start]
                return _Piece(self, file, latch, data, piece.offset, len(data))
            block = self._pool.take()
            try:
                with self.meter.phase("gather"):
                    image.gather(piece.start, piece.stop, block)
            except BaseException:
                self._pool.give(block)
                raise
            data = block[: round_up(piece.size_bytes, file.alignment.offset)]
            return _Piece(self, file, latch, data, piece.offset, len(data), block)

        self._move(pieces, put, on_complete)

    def read(self, file: DirectFile, part: Extent, on_complete: OnComplete = ignore) -> None:
        (image, start, stop, offset), size = part, self._pool.block_size
        pieces = (
            Extent(image, max(first, start), min(first + size, stop), first)
            for first in range(offset, stop, size)
        )

        def get(latch: CompletionLatch, piece: Extent) -> _Piece:
            _, begin, end, first = piece
            data = view_to_fill(piece, file.alignment) if begin == first else None
            if data is not None:
                return _Piece(self, file, latch, data, first, end - first)
            block = self._pool.take()
            room = block[: round_up(end - first, file.alignment.offset)]
            copy_out = functools.partial(image.scatter, begin, end, block[begin - first :])
            return _Piece(self, file, latch, room, first, end - first, block, copy_out)

        self._move(pieces, get, on_complete)

    def _move(
        self,
        pieces: Iterable[Extent],
        make: Callable[[CompletionLatch, Extent], _Piece],
        on_complete: OnComplete,
    ) -> None:
        """Make each piece of a range by `make`, and start it once the queue has a free place."""
        most = most_pieces(self._iodepth)
        with CompletionLatch(on_complete) as latch:
            for piece in pieces:
                self._submit()
                while len(self) >= most:
                    self._submit(wait=True)
                    self._copy_out()
                self._due.append(make(latch, piece))
                latch.add()
                self._submit()

    def _submit(self, *, wait: bool = False) -> None:
        """Start pieces until `iodepth` are in flight or no piece is due.

        With `wait`, one piece more has ended or is to be copied on return.
        """
        in_flight, before = self._in_flight, len(self)
        while True:
            in_flight.reap()
            while self._due and len(in_flight) < self._iodepth:
                in_flight.submit(self._due.popleft())
            if not wait or len(self) < before or self._to_copy:
                return
            in_flight.wait_one()
            wait = False

    def _copy_out(self) -> None:
        """Copy one piece that was read, if there is one."""
        if not self._to_copy:
            return
        piece, ok = self._to_copy.popleft(), False
        assert piece.copy_out is not None
        try:
            with self.meter.phase("scatter"):
                piece.copy_out()
            ok = True
        finally:
            piece.finish(ok)

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._due) + len(self._to_copy)

    def wait_one(self) -> None:
        self._submit(wait=True)
        self._copy_out()

    def close(self, failure: BaseException | None = None) -> None:
        try:
            for waiting in (self._due, self._to_copy):
                while waiting:
                    waiting.popleft().finish(False)
        finally:
            self._in_flight.close(failure)
