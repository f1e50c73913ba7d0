"""The `odirect` writer: past the page cache, staged through aligned blocks by a few workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iobench.units import GIB, KIB, MIB
from iobench.writers.crew import ThreadCrew
from iobench.writers.direct import DirectWriter, as_it_lies, round_up
from iobench.writers.direct_io import pread_direct, pwrite_direct
from iobench.writers.direct_stream import DirectStream
from iobench.writers.files import NewFile
from iobench.writers.image import FileImage
from iobench.writers.options import WriterOptions, option
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter
from iobench.writers.workers import Blocks, run_workers

__all__ = ["ODirectOptions", "ODirectWriter"]


@dataclass(frozen=True, kw_only=True)
class ODirectOptions(WriterOptions):
    """Options of `odirect`."""

    block_size: int = option(
        8 * MIB,
        unit="bytes",
        low=4 * KIB,
        high=GIB,
        multiple_of=4 * KIB,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        help="bytes of one direct write or read",
    )
    threads: int = option(
        4, low=1, high=256, search=(1, 2, 3, 4, 6, 8), help="workers, each with one block in flight"
    )
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class ODirectWriter(DirectWriter):
    """Each worker takes the next block of the image, gathers it and writes it, O_DIRECT.

    With two workers or more the copy of one block runs beside the write of another. A block whose
    memory already lies as the device wants it is written without a copy. The tail is padded,
    written and cut off again.
    """

    name = "odirect"
    summary = "past the page cache (O_DIRECT), staged in aligned blocks by several threads"
    Options = ODirectOptions
    options: ODirectOptions

    @property
    def _reserves(self) -> bool:
        return self.options.fallocate

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        alignment = self._alignment(file.fd)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._pool.block() as staging:
                for start, stop in blocks:
                    data = as_it_lies(image, start, stop, alignment)
                    if data is None:
                        with own.phase("gather"):
                            image.gather(start, stop, staging)
                        data = staging[: round_up(stop - start, alignment.offset)]
                    with own.phase("write"):
                        calls = pwrite_direct(file.fd, data, start, alignment.offset)
                    own.count("direct", len(data), calls)

        self._run(0, image.size_bytes, work, meter)

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        alignment = self._alignment(fd)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._pool.block() as staging:
                for begin, end in blocks:
                    wanted = max(begin, start)
                    data = as_it_lies(image, wanted, end, alignment) if wanted == begin else None
                    block = staging[: round_up(end - begin, alignment.offset)]
                    target = block if data is None else data
                    with own.phase("read"):
                        calls = pread_direct(fd, target, begin, end - begin, alignment.offset)
                    own.count("direct", end - begin, calls)
                    if data is None:
                        with own.phase("scatter"):
                            image.scatter(wanted, end, block[wanted - begin :])

        self._run(start - start % alignment.offset, stop, work, meter)

    def _run(
        self, start: int, stop: int, work: Callable[[Blocks, Meter], None], meter: Meter
    ) -> None:
        size = self.options.block_size
        threads = max(1, min(self.options.threads, -(-(stop - start) // size)))
        run_workers(threads, Blocks(start, stop, size), work, meter)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        alignment = self._alignment(file.fd).offset
        crew = ThreadCrew(
            file.fd, pool=self._pool, threads=self.options.threads, alignment=alignment
        )
        return DirectStream(
            file,
            self.name,
            meter,
            crew=crew,
            pool=self._pool,
            alignment=alignment,
            reserve_ahead=self.options.fallocate and not size,
        )
