"""RingEngine: the direct engine that keeps many blocks in flight on an io_uring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from iobench.writers.direct_engine import DirectEngine, Landing, nothing
from iobench.writers.direct_file import DirectFile, as_it_lies, round_up
from iobench.writers.flight import Flight, Landed
from iobench.writers.image import Bytes, FileImage
from iobench.writers.iodepth import Iodepth
from iobench.writers.ring import Ring
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["RingEngine"]


@dataclass(slots=True)
class _Piece:
    """One operation: memory that the kernel moves to or from `offset`, and who is told of it."""

    data: Bytes
    offset: int
    wanted: int
    ended: Landed


@dataclass(slots=True)
class _Arrival:
    """A block that has been read, and is still to be copied to where its bytes belong."""

    image: FileImage
    start: int
    stop: int
    data: Bytes
    ended: Landed


class RingEngine(DirectEngine):
    """Ranges go in pieces, of the blocks of `pool`; as many as `iodepth` says are in flight.

    The device does not wait for copies: a piece is copied into its block before there is room for
    it, and what has landed makes room for the next one before it is copied out. A quarter more
    pieces than are in flight suffice for that, as memory is faster than the device
    (docs/decisions/0036).

    `write` and `read` return when there is room for a further piece. The ring belongs to the
    calling thread; KeyboardInterrupt must not get in here, see Flight.
    """

    def __init__(
        self,
        ring: Ring,
        iodepth: Iodepth,
        pool: BlockPool,
        meter: Meter,
        *,
        writes: bool,
        path: str,
    ) -> None:
        self._ring, self._iodepth, self._pool, self._meter = ring, iodepth, pool, meter
        self._writes, self._path = writes, path
        self._flight: Flight | None = None
        self._due: deque[_Piece] = deque()
        self._arrived: deque[_Arrival] = deque()

    def write(
        self,
        file: DirectFile,
        image: FileImage,
        start: int,
        stop: int,
        *,
        at: int,
        landed: Landed = nothing,
    ) -> None:
        def put(begin: int, end: int, ended: Landed) -> _Piece:
            offset = at + begin - start
            data = as_it_lies(image, begin, end, file.alignment)
            if data is not None:
                return _Piece(data, offset, len(data), ended)
            block, give_back = self._take(ended)
            try:
                with self._meter.phase("gather"):
                    image.gather(begin, end, block)
            except BaseException:
                give_back(False)
                raise
            data = block[: round_up(end - begin, file.alignment.offset)]
            return _Piece(data, offset, len(data), give_back)

        self._in_pieces(file, start, stop, put, landed)

    def read(
        self,
        file: DirectFile,
        image: FileImage,
        begin: int,
        wanted: int,
        stop: int,
        *,
        landed: Landed = nothing,
    ) -> None:
        def get(first: int, end: int, ended: Landed) -> _Piece:
            least = max(first, wanted)
            data = as_it_lies(image, least, end, file.alignment) if least == first else None
            if data is not None:
                return _Piece(data, first, end - first, ended)
            block, give_back = self._take(ended)

            def arrived(whole: bool) -> None:
                if whole:
                    data = block[least - first :]
                    self._arrived.append(_Arrival(image, least, end, data, give_back))
                else:
                    give_back(False)

            room = block[: round_up(end - first, file.alignment.offset)]
            return _Piece(room, first, end - first, arrived)

        self._in_pieces(file, begin, stop, get, landed)

    def _in_pieces(
        self,
        file: DirectFile,
        start: int,
        stop: int,
        make: Callable[[int, int, Landed], _Piece],
        landed: Landed,
    ) -> None:
        size, flight = self._pool.block_size, self._flight_on(file)
        pieces = range(start, stop, size)
        landing, begun = Landing(len(pieces), landed), 0
        try:
            for begin in pieces:
                self._submit(flight)
                while len(self) >= self._most_pieces:
                    self.land()
                begun += 1
                self._due.append(make(begin, min(begin + size, stop), landing.end))
                self._submit(flight)
        finally:
            landing.give_up(len(pieces) - begun)

    @property
    def _most_pieces(self) -> int:
        return self._iodepth.now + max(1, self._iodepth.now // 4)

    def _submit(self, flight: Flight) -> None:
        """Have as much in flight as may be."""
        before = len(flight)
        flight.land_ready()
        self._landed(before - len(flight))
        while self._due and len(flight) < self._iodepth.now:
            piece = self._due.popleft()
            flight.start(piece.data, piece.offset, piece.wanted, piece.ended)

    def _landed(self, pieces: int) -> None:
        if pieces:
            self._iodepth.landed(pieces * self._pool.block_size)

    def _copy_out(self, arrival: _Arrival) -> None:
        copied = False
        try:
            with self._meter.phase("scatter"):
                arrival.image.scatter(arrival.start, arrival.stop, arrival.data)
            copied = True
        finally:
            arrival.ended(copied)

    def _take(self, ended: Landed) -> tuple[Bytes, Landed]:
        """A block of the pool, and what gives it back when the kernel has let go of it."""
        block = self._pool.take()

        def give_back(whole: bool) -> None:
            self._pool.give(block)
            ended(whole)

        return block, give_back

    def _flight_on(self, file: DirectFile) -> Flight:
        if self._flight is None:
            self._flight = Flight(
                self._ring,
                file.fd,
                writes=self._writes,
                alignment=file.alignment.offset,
                path=self._path,
                meter=self._meter,
            )
        return self._flight

    def __len__(self) -> int:
        flying = len(self._flight) if self._flight else 0
        return flying + len(self._due) + len(self._arrived)

    @property
    def bytes_in_flight(self) -> int:
        return len(self) * self._pool.block_size

    def land(self) -> None:
        assert self._flight is not None
        before = len(self)
        self._submit(self._flight)
        if len(self) == before and not self._arrived:
            self._flight.land()
            self._landed(1)
            self._submit(self._flight)
        if self._arrived:
            self._copy_out(self._arrived.popleft())

    def settle(self) -> None:
        super().settle()
        self._iodepth.disturbed()

    def close(self, failure: BaseException | None = None) -> None:
        try:
            while self._due:
                self._due.popleft().ended(False)
            while self._arrived:
                self._arrived.popleft().ended(False)
        finally:
            if self._flight is None:
                self._ring.close()
            else:
                self._flight.end(failure)
