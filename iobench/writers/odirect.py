"""The `odirect` writer: past the page cache, through aligned blocks, by a few threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.units import MIB
from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import DirectValues, WriterOptions, block_size_option, option


@dataclass(frozen=True, kw_only=True)
class ODirectOptions(WriterOptions):
    """Options of `odirect`."""

    block_size: int = block_size_option(
        8 * MIB,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        help="bytes of one direct write or read",
    )
    threads: int = option(
        4, low=1, high=256, search=(1, 2, 3, 4, 6, 8), help="workers, each with one block in flight"
    )
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class ODirectWriter(FileWriter):
    """Each worker takes the next block of the image, gathers it and writes it with O_DIRECT.

    With two or more workers, the copy of one block overlaps the write of another. A block whose
    memory has the alignment that the device needs is written without a copy. The tail is padded,
    written, and the file is truncated to its size.
    """

    name = "odirect"
    summary = "past the page cache (O_DIRECT), staged in aligned blocks by several threads"
    Options = ODirectOptions
    options: ODirectOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: ODirectOptions | None = None, **values: Unpack[DirectValues]
        ) -> None: ...

    def _setting(self) -> FileSetting:
        how = self.options
        return FileSetting(
            paths=(IoPath.DIRECT,),
            block_size=how.block_size,
            threads=how.threads,
            stream_depth=how.threads,
        )
