"""CachedStream: the stream of the writers that use the page cache; and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from iobench.units import MIB
from iobench.writers.image import Bytes
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.posix import pwrite_all
from iobench.writers.options import WriterOptions, block_size_option, option
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

__all__ = ["CachedOptions", "CachedStream", "PlainSink", "Sink"]


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


class Sink(Protocol):
    """Writes bytes at an offset of one open file. Zero-copy: the kernel reads the views."""

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        """Write all of the consecutive `views` at `offset`."""

    def finish(self) -> None:
        """Finish pending work after the last write."""


class PlainSink:
    """pwritev with fixed flags: 0 for the page cache, RWF_DONTCACHE to leave no pages in it."""

    def __init__(self, fd: int, path: str, flags: int = 0) -> None:
        self._fd, self._path, self._flags = fd, path, flags

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        """Write all of the consecutive `views` at `offset`."""
        with meter.operation("write"):
            calls = pwrite_all(self._fd, views, offset, self._flags)
        meter.count(self._path, sum(map(len, views)), calls)

    def finish(self) -> None:
        """Do nothing: no work is pending after a write."""


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
