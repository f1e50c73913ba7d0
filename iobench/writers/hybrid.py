"""The `hybrid` writer: each operation takes the path that suits it; see FileWriter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench import linux
from iobench.units import GIB, KIB, MIB
from iobench.writers.direct.file import IoPath
from iobench.writers.file_writer import FileSetting, FileWriter
from iobench.writers.options import HybridValues, WriterOptions, block_size_option, option

_PATHS = {
    "all": tuple(IoPath),
    "direct": (IoPath.DIRECT, IoPath.BUFFERED),
    "uncached": (IoPath.UNCACHED, IoPath.BUFFERED),
}

_PIECE = 2 * MIB  # one operation on a ring; measured in docs/decisions/0010


@dataclass(frozen=True, kw_only=True)
class HybridOptions(WriterOptions):
    """Options of `hybrid`."""

    block_size: int = block_size_option(
        8 * MIB,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB),
        help="bytes of one large operation",
    )
    iodepth: int = option(
        4,
        low=1,
        high=256,
        search=(1, 2, 3, 4, 6, 8),
        help="large operations in flight; without io_uring one thread for each",
    )
    uring: bool = option(
        True,
        search=(True, False),
        help="use io_uring, where available, for direct operations (in pieces of 2 MiB)",
    )
    small_size: int = option(
        256 * KIB,
        unit="bytes",
        low=linux.PAGE,
        high=GIB,
        search=(64 * KIB, 256 * KIB, MIB),
        help="a file or a tail below this size goes through the page cache",
    )
    paths: str = option(
        "all",
        choices=tuple(_PATHS),
        search=tuple(_PATHS),
        help="paths of large operations: direct, uncached, or all (direct where it works)",
    )
    read_soon: bool = option(False, help="the files will be read soon: keep them in the page cache")
    fallocate: bool = option(
        True, search=(True, False), help="reserve the space of large files before writing"
    )


class HybridWriter(FileWriter):
    """Writes small records through the page cache, and large blocks past it where that works.

    `FileSetting` chooses the path of every operation, and `PathFile` carries it out.
    The `decisions` of a Transfer count operations by path and reason. When the file system refuses
    a path, the writer records a fallback and stops using that path, so it works everywhere.
    """

    name = "hybrid"
    summary = "chooses for each operation: page cache, RWF_DONTCACHE, or O_DIRECT with io_uring"
    Options = HybridOptions
    options: HybridOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: HybridOptions | None = None, **values: Unpack[HybridValues]
        ) -> None: ...

    def _setting(self) -> FileSetting:
        how = self.options
        paths = _PATHS[how.paths]
        piece_size = min(_PIECE, how.block_size)
        depth = how.iodepth * -(-how.block_size // piece_size)
        return FileSetting(
            paths=paths,
            block_size=how.block_size,
            threads=how.iodepth,
            rings=1 if how.uring and IoPath.DIRECT in paths else 0,
            iodepth=depth,
            piece_size=piece_size,
            stream_depth=how.iodepth,
            small_size=min(how.small_size, how.block_size),
            read_soon=how.read_soon,
        )
