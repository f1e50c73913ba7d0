"""The `buffered` writer: through the page cache, like nearly every framework today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import CachedOptions, DirectValues


@dataclass(frozen=True, kw_only=True)
class BufferedOptions(CachedOptions):
    """Options of `buffered`."""


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
