"""The `uring` writer: many blocks in flight from one thread, by io_uring."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from iobench.units import GIB, KIB, MIB
from iobench.writers.direct import DirectWriter, as_it_lies, round_up
from iobench.writers.direct_stream import DirectStream
from iobench.writers.files import NewFile
from iobench.writers.flight import Flight, Landed
from iobench.writers.image import Bytes, FileImage
from iobench.writers.options import WriterOptions, option
from iobench.writers.ring import open_ring
from iobench.writers.ring_crew import RingCrew
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool, Blocks, run_workers

__all__ = ["UringOptions", "UringWriter"]

_TOGETHER = 128 * MIB  # of staging blocks made at once, so that they lie in huge pages


@dataclass(frozen=True, kw_only=True)
class UringOptions(WriterOptions):
    """Options of `uring`."""

    iodepth: int = option(
        32, low=1, high=1024, search=(4, 8, 16, 32, 64), help="blocks in flight on each ring"
    )
    block_size: int = option(
        MIB,
        unit="bytes",
        low=4 * KIB,
        high=GIB,
        multiple_of=4 * KIB,
        search=(512 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB),
        help="bytes of one write or read",
    )
    rings: int = option(1, low=1, high=64, search=(1, 2), help="threads, each with a ring")
    direct: bool = option(True, help="past the page cache (O_DIRECT)")
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class UringWriter(DirectWriter):
    """One thread keeps `iodepth` blocks in flight and copies into free ones meanwhile.

    Each further ring has a thread of its own and takes blocks from the same file. A block whose
    memory already lies as the device wants it is moved without a copy. The calling thread only
    waits: a Ctrl-C in it ends the transfer when the kernel has let go of all memory.
    """

    name = "uring"
    summary = "past the page cache by io_uring: many aligned blocks in flight from one thread"
    Options = UringOptions
    options: UringOptions

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._flags = os.O_DIRECT if self.options.direct else 0
        together = min(self.options.iodepth + 1, max(1, _TOGETHER // self._block_size))
        self._pool = BlockPool(self._block_size, together=together)

    @property
    def _reserves(self) -> bool:
        return self.options.fallocate

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        alignment = self._alignment(file.fd)

        def write(flight: Flight, start: int, stop: int, own: Meter) -> None:
            data = as_it_lies(image, start, stop, alignment)
            if data is not None:
                flight.start(data, start, len(data), _nothing)
                return
            block, give_back = self._take()
            try:
                with own.phase("gather"):
                    image.gather(start, stop, block)
            except BaseException:
                give_back(False)
                raise
            data = block[: round_up(stop - start, alignment.offset)]
            flight.start(data, start, len(data), give_back)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._flight(file.fd, own, writes=True) as flight:
                for start, stop in blocks:
                    self._make_room(flight)
                    write(flight, start, stop, own)
                flight.land_all()

        self._run(0, image.size_bytes, work, meter)

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        alignment = self._alignment(fd)

        def read(flight: Flight, begin: int, end: int, own: Meter) -> None:
            wanted = max(begin, start)
            data = as_it_lies(image, wanted, end, alignment) if wanted == begin else None
            if data is not None:
                flight.start(data, begin, end - begin, _nothing)
                return
            block, give_back = self._take()

            def landed(whole: bool) -> None:
                try:
                    if whole:
                        with own.phase("scatter"):
                            image.scatter(wanted, end, block[wanted - begin :])
                finally:
                    give_back(whole)

            room = block[: round_up(end - begin, alignment.offset)]
            flight.start(room, begin, end - begin, landed)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._flight(fd, own, writes=False) as flight:
                for begin, end in blocks:
                    self._make_room(flight)
                    read(flight, begin, end, own)
                flight.land_all()

        self._run(start - start % alignment.offset, stop, work, meter)

    def _take(self) -> tuple[Bytes, Landed]:
        """A block of the pool, and what gives it back when it has landed."""
        block = self._pool.take()
        return block, lambda _whole: self._pool.give(block)

    def _make_room(self, flight: Flight) -> None:
        while len(flight) >= self.options.iodepth:
            flight.land()

    def _run(
        self, start: int, stop: int, work: Callable[[Blocks, Meter], None], meter: Meter
    ) -> None:
        size = self.options.block_size
        rings = min(self.options.rings, -(-(stop - start) // size))
        if rings:
            run_workers(rings, Blocks(start, stop, size), work, meter, apart=True)

    def _flight(self, fd: int, meter: Meter, *, writes: bool) -> Flight:
        how = "direct" if self.options.direct else "buffered"
        return Flight(
            open_ring(self.options.iodepth),
            fd,
            writes=writes,
            alignment=self._alignment(fd).offset,
            path=f"io_uring {how}",
            meter=meter,
        )

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        crew = RingCrew(
            file.fd,
            pool=self._pool,
            iodepth=self.options.iodepth,
            make_flight=lambda own: self._flight(file.fd, own, writes=True),
        )
        return DirectStream(
            file,
            self.name,
            meter,
            crew=crew,
            pool=self._pool,
            alignment=self._alignment(file.fd).offset,
            reserve_ahead=self.options.fallocate and not size,
        )


def _nothing(_whole: bool) -> None:
    pass
