"""RingEngine: the direct engine that keeps many blocks in flight on an io_uring."""

from __future__ import annotations

from collections.abc import Callable

from iobench.writers.direct_engine import DirectEngine, Landing, nothing
from iobench.writers.direct_file import DirectFile, as_it_lies, round_up
from iobench.writers.flight import Flight, Landed
from iobench.writers.image import Bytes, FileImage
from iobench.writers.ring import Ring
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["RingEngine"]


class RingEngine(DirectEngine):
    """Ranges go in pieces, of the blocks of `pool`; at most `iodepth` of them are in flight.

    `write` and `read` return when the last piece has been submitted, and wait before only for
    room. The ring belongs to the calling thread; KeyboardInterrupt must not get in here, see
    Flight.
    """

    def __init__(
        self, ring: Ring, iodepth: int, pool: BlockPool, meter: Meter, *, writes: bool, path: str
    ) -> None:
        self._ring, self._iodepth, self._pool, self._meter = ring, iodepth, pool, meter
        self._writes, self._path = writes, path
        self._flight: Flight | None = None

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
        def put(flight: Flight, begin: int, end: int, ended: Landed) -> None:
            offset = at + begin - start
            data = as_it_lies(image, begin, end, file.alignment)
            if data is not None:
                flight.start(data, offset, len(data), ended)
                return
            block, give_back = self._take(ended)
            try:
                with self._meter.phase("gather"):
                    image.gather(begin, end, block)
            except BaseException:
                give_back(False)
                raise
            data = block[: round_up(end - begin, file.alignment.offset)]
            flight.start(data, offset, len(data), give_back)

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
        def get(flight: Flight, first: int, end: int, ended: Landed) -> None:
            least = max(first, wanted)
            data = as_it_lies(image, least, end, file.alignment) if least == first else None
            if data is not None:
                flight.start(data, first, end - first, ended)
                return
            block, give_back = self._take(ended)

            def arrived(whole: bool) -> None:
                scattered = False
                try:
                    if whole:
                        with self._meter.phase("scatter"):
                            image.scatter(least, end, block[least - first :])
                        scattered = True
                finally:
                    give_back(scattered)

            room = block[: round_up(end - first, file.alignment.offset)]
            flight.start(room, first, end - first, arrived)

        self._in_pieces(file, begin, stop, get, landed)

    def _in_pieces(
        self,
        file: DirectFile,
        start: int,
        stop: int,
        begin_piece: Callable[[Flight, int, int, Landed], None],
        landed: Landed = nothing,
    ) -> None:
        size, flight = self._pool.block_size, self._flight_on(file)
        pieces = range(start, stop, size)
        landing, begun = Landing(len(pieces), landed), 0
        try:
            for begin in pieces:
                while len(flight) >= self._iodepth:
                    flight.land()
                begun += 1
                begin_piece(flight, begin, min(begin + size, stop), landing.end)
        finally:
            landing.give_up(len(pieces) - begun)

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
        return len(self._flight) if self._flight else 0

    @property
    def bytes_in_flight(self) -> int:
        return len(self) * self._pool.block_size

    def land(self) -> None:
        assert self._flight is not None
        self._flight.land()

    def close(self, failure: BaseException | None = None) -> None:
        if self._flight is None:
            self._ring.close()
        else:
            self._flight.end(failure)
