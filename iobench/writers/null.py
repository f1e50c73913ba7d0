"""The `null` writer: gathers every byte and stores nothing. It measures the harness itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from iobench.units import GIB, KIB, MIB
from iobench.writers.base import Availability, Writer
from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
from iobench.writers.device.staging import staged
from iobench.writers.image import Bytes, FileImage
from iobench.writers.options import NullValues, WriterOptions, option
from iobench.writers.stream import BlockStream, PlainSink
from iobench.writers.transfer import Meter, Transfer


@dataclass(frozen=True, kw_only=True)
class NullOptions(WriterOptions):
    """Options of `null`."""

    block_size: int = option(
        16 * MIB, unit="bytes", low=4 * KIB, high=GIB, help="bytes of one block"
    )
    threads: int = option(1, low=1, high=256, help="workers that copy blocks concurrently")


class NullWriter(Writer):
    """Copies every byte of the image to a block (write) or a block to the image (read). No I/O.

    After a read the content of the image's memory is undefined. `open` discards everything.
    """

    name = "null"
    summary = "copies in memory and stores nothing: the speed of the harness itself"
    stores = False
    schemes = ("file", "s3")
    Options = NullOptions
    options: NullOptions

    def __init__(self, options: NullOptions | None = None, **values: Unpack[NullValues]) -> None:
        super().__init__(options, **values)
        self._pool = BlockPool(self.options.block_size)

    def available(self, target: str | Path = ".") -> Availability:  # noqa: ARG002
        return Availability(ok=True)

    def write(
        self,
        image: FileImage,
        target: str | Path,  # noqa: ARG002
        *,
        durable: bool = True,  # noqa: ARG002
        sync_directory: bool = True,  # noqa: ARG002
    ) -> Transfer:
        meter = Meter()
        self._copy(image, 0, image.size_bytes, meter, to_block=True)
        return meter.transfer(self.name, "write", image.size_bytes, durable=False)

    def read(
        self,
        image: FileImage,
        target: str | Path,  # noqa: ARG002
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> Transfer:
        meter = Meter()
        start, stop = self._range_to_fill(image, start, stop)
        self._copy(image, start, stop, meter, to_block=False)
        return meter.transfer(self.name, "read", stop - start, durable=False)

    def open(self, target: str | Path, size: int | None = None) -> BlockStream:  # noqa: ARG002
        meter = Meter()

        def copy(views: list[Bytes], _: int) -> None:
            (view,) = views
            with self._pool.block() as block, meter.phase("gather"):
                block[: len(view)] = view
            meter.count("null", len(view))

        sink = PlainSink(copy, self.options.block_size)
        return BlockStream(_NoFile(os.fspath(target)), self.name, meter, sink, durable=False)

    def _copy(
        self, whole: FileImage, start: int, stop: int, meter: Meter, *, to_block: bool
    ) -> None:
        def work(blocks: Blocks, own: Meter) -> None:
            with self._pool.block() as block:
                for begin, end in blocks:
                    with own.phase("gather" if to_block else "scatter"):
                        (image.gather if to_block else image.scatter)(begin, end, block)
                    own.count("null", end - begin)

        with staged(whole, meter) as image:
            blocks = Blocks([(start, stop)], self.options.block_size)
            run_workers(self.options.threads, blocks, work, meter)


class _NoFile:
    """Takes the place of the new file of a stream."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _do_nothing(self, *_: object, **how: object) -> None:
        pass

    set_size = sync = publish = abandon = _do_nothing
