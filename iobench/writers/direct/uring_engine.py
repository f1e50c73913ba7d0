"""RingEngine: a DirectEngine that keeps many blocks in flight on an io_uring."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable

from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.engine import CompletionLatch, DirectEngine, ignore
from iobench.writers.direct.in_flight import InFlight, OnComplete, Ring, RingOperation
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import DirectFile, aligned_view, round_up, view_to_fill
from iobench.writers.transfer import Meter

__all__ = ["RingEngine", "most_pieces"]


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
