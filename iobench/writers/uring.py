"""The `uring` writer: many blocks in flight from one thread, by io_uring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.units import KIB, MIB
from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import UringValues, WriterOptions, block_size_option, option


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


class UringWriter(FileWriter):
    """One thread keeps `iodepth` blocks in flight, and fills free blocks at the same time.

    Each further ring has its own thread and takes blocks of the same file. A block whose memory has
    the alignment that the device needs is moved without a copy. The calling thread only waits:
    Ctrl-C in it ends the transfer once the kernel uses none of the memory any more.
    """

    name = "uring"
    summary = "past the page cache by io_uring: many aligned blocks in flight from one thread"
    Options = UringOptions
    options: UringOptions
    if TYPE_CHECKING:

        def __init__(
            self, options: UringOptions | None = None, **values: Unpack[UringValues]
        ) -> None: ...

    def _setting(self) -> FileSetting:
        how = self.options
        return FileSetting(
            paths=(IoPath.DIRECT,),
            block_size=how.block_size,
            rings=how.rings,
            iodepth=how.iodepth,
            piece_size=how.block_size,
            stream_depth=how.iodepth,
            o_direct=how.direct,
        )
