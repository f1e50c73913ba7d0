"""The `uring` writer: many blocks in flight from one thread, by io_uring."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.units import KIB, MIB
from iobench.writers.direct.base import DirectWriter
from iobench.writers.direct.engine import DirectEngine
from iobench.writers.direct.uring_engine import RingEngine, most_pieces
from iobench.writers.direct.uring_queue import open_ring
from iobench.writers.options import WriterOptions, block_size_option, option
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.typed import UringValues

__all__ = ["UringOptions", "UringWriter"]


@dataclass(frozen=True, kw_only=True)
class UringOptions(WriterOptions):
    """Options of `uring`."""

    iodepth: int = option(
        8, low=1, high=1024, search=(4, 8, 16, 32, 64), help="blocks in flight on each ring"
    )
    block_size: int = block_size_option(
        4 * MIB,
        search=(512 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB),
        help="bytes of one write or read",
    )
    rings: int = option(1, low=1, high=64, search=(1, 2), help="threads, each with its own ring")
    direct: bool = option(True, help="past the page cache (O_DIRECT)")
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class UringWriter(DirectWriter):
    """One thread keeps `iodepth` blocks in flight, and fills free blocks at the same time.

    Each further ring has its own thread and takes blocks of the same file. A block whose memory has
    the alignment that the device needs is moved without a copy. The calling thread only waits:
    Ctrl-C in it ends the transfer once the kernel uses none of the memory any more.
    """

    name = "uring"
    summary = "past the page cache by io_uring: many aligned blocks in flight from one thread"
    Options = UringOptions
    options: UringOptions
    _caller_waits = True

    def __init__(self, options: UringOptions | None = None, **values: Unpack[UringValues]) -> None:
        super().__init__(options, **values)
        self._flags = os.O_DIRECT if self.options.direct else 0

    @property
    def _workers(self) -> int:
        return self.options.rings

    @property
    def _stream_depth(self) -> int:
        return self.options.iodepth

    @property
    def _most_blocks(self) -> int:
        return max(super()._most_blocks, self.options.rings * most_pieces(self.options.iodepth))

    @property
    def _path(self) -> str:
        return "io_uring direct" if self.options.direct else "io_uring buffered"

    def _engine(self, meter: Meter, *, writes: bool) -> DirectEngine:
        iodepth = self.options.iodepth
        with meter.phase("open"):
            ring = open_ring(iodepth)
        return RingEngine(ring, iodepth, self._pool, meter, writes=writes, path=self._path)
