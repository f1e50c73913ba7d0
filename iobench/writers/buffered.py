"""The `buffered` writer: through the page cache, like nearly every framework today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.units import MIB
from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import DirectValues, WriterOptions, block_size_option, option


@dataclass(frozen=True, kw_only=True)
class BufferedOptions(WriterOptions):
    """Options of `buffered`."""

    block_size: int = block_size_option(
        16 * MIB,
        search=(MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        help="bytes of one pwritev or preadv",
    )
    threads: int = option(
        1, low=1, high=256, search=(1, 2, 4), help="workers that move blocks concurrently"
    )
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class BufferedWriter(FileWriter):
    """pwritev straight from the image's memory into the page cache, then fsync."""

    name = "buffered"
    summary = "through the page cache, zero-copy pwritev, then fsync: the baseline"
    Options = BufferedOptions
    options: BufferedOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: BufferedOptions | None = None, **values: Unpack[DirectValues]
        ) -> None: ...

    def _setting(self) -> FileSetting:
        how = self.options
        return FileSetting(paths=(IoPath.BUFFERED,), block_size=how.block_size, threads=how.threads)
