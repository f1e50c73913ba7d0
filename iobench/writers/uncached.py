"""The `uncached` writer: through the page cache, leaving no pages in it (RWF_DONTCACHE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.writers.buffered import BufferedOptions
from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import UncachedValues, option


@dataclass(frozen=True, kw_only=True)
class UncachedOptions(BufferedOptions):
    """Options of `uncached`."""

    method: str = option(
        "auto",
        choices=("auto", "dontcache", "sync_file_range"),
        help="RWF_DONTCACHE, or write-back by sync_file_range; auto: the first one that works",
    )


class UncachedWriter(FileWriter):
    """RWF_DONTCACHE (Linux >= 6.14): the kernel starts write-back at once and drops clean pages.

    If the kernel or the file system refuses the flag, `method="auto"` starts write-back by
    sync_file_range, drops pages by POSIX_FADV_DONTNEED, and records the fallback.
    """

    name = "uncached"
    summary = "through the page cache, then dropped (RWF_DONTCACHE, else sync_file_range)"
    Options = UncachedOptions
    options: UncachedOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: UncachedOptions | None = None, **values: Unpack[UncachedValues]
        ) -> None: ...

    def _setting(self) -> FileSetting:
        how = self.options
        return FileSetting(
            paths=(IoPath.UNCACHED,),
            block_size=how.block_size,
            threads=how.threads,
            dontcache=how.method,
        )
