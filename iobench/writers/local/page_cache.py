"""CachedWriter: the base of the writers that use the page cache, and their stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iobench.units import MIB
from iobench.writers.base import Availability
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.new_file import NewFile, try_directory
from iobench.writers.local.posix import PosixWriter
from iobench.writers.local.sinks import PushingSink, Sink
from iobench.writers.options import WriterOptions, block_size_option, option
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

__all__ = ["CachedOptions", "CachedStream", "CachedWriter", "Fill"]

Fill = Callable[[list[Bytes], int, Meter], None]
"""Fills consecutive views from an offset of a file."""


@dataclass(frozen=True, kw_only=True)
class CachedOptions(WriterOptions):
    """Options of the writers that use the page cache."""

    block_size: int = block_size_option(
        16 * MIB,
        search=(MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        help="bytes of one pwritev or preadv",
    )
    threads: int = option(
        1, low=1, high=256, search=(1, 2, 4), help="workers that move blocks concurrently"
    )
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class CachedWriter(PosixWriter):
    """Zero-copy between the image's memory and the page cache; subclasses choose the sink."""

    options: CachedOptions

    @abstractmethod
    def _sink(self, file: NewFile, meter: Meter) -> Sink:
        """Return the sink for the bytes of a new file."""

    @abstractmethod
    def _source(self, fd: int, meter: Meter) -> Fill:
        """Return the function that fills views from an offset of the open file."""

    def _workers(self, image: FileImage) -> int:
        """Return the most workers. Of two, one copies device memory while the other stores."""
        return max(self.options.threads, 2 if image.on_device else 1)

    def available(self, target: str | Path = ".") -> Availability:
        return try_directory(target)

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        sink = self._sink(file, meter)

        def work(blocks: Blocks, own: Meter) -> None:
            for start, stop in blocks:
                with image.outgoing(start, stop, own) as views:
                    sink.write(views, start, own)

        threads = 1 if isinstance(sink, PushingSink) else self._workers(image)
        blocks = Blocks(0, image.size_bytes, self.options.block_size)
        run_workers(threads, blocks, work, meter)
        with meter.phase("write"):
            sink.finish()

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        fill = self._source(fd, meter)

        def work(blocks: Blocks, own: Meter) -> None:
            for begin, end in blocks:
                with image.incoming(begin, end, own) as views, own.operation("read"):
                    fill(views, begin, own)
                image.filled(begin, end)

        blocks = Blocks(start, stop, self.options.block_size)
        run_workers(self._workers(image), blocks, work, meter)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:  # noqa: ARG002
        sink = self._sink(file, meter)
        return CachedStream(file, self.name, meter, sink, self.options.block_size)


class CachedStream(Stream):
    """A stream into a sink. Large writes go directly to it, small ones are collected first."""

    _SMALL = 1 << 20

    def __init__(
        self, file: NewFile, writer: str, meter: Meter, sink: Sink, block_size: int
    ) -> None:
        super().__init__(file, writer, meter)
        self._sink, self._block_size = sink, block_size
        self._small = np.empty(self._SMALL, dtype=np.uint8)
        self._filled = 0
        self._offset = 0

    @property
    def _position(self) -> int:
        return self._offset + self._filled

    def _append(self, data: Bytes) -> None:
        if self._filled + len(data) <= self._SMALL:
            np.copyto(self._small[self._filled : self._filled + len(data)], data)
            self._filled += len(data)
            return
        self._send_small()
        for start in range(0, len(data), self._block_size):
            self._send(data[start : start + self._block_size])

    def _send(self, data: Bytes) -> None:
        self._sink.write([data], self._offset, self._meter)
        self._offset += len(data)

    def _send_small(self) -> None:
        if self._filled:
            filled, self._filled = self._filled, 0
            self._send(self._small[:filled])

    def _drain(self) -> int:
        self._send_small()
        self._sink.finish()
        return self._offset

    def _release(self) -> None:
        self._small = self._small[:0]
