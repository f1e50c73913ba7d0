"""The `buffered` writer: through the page cache, like nearly every framework today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from iobench.writers.image import Bytes
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.page_cache import CachedOptions, CachedWriter, Fill
from iobench.writers.local.posix import pread_all
from iobench.writers.local.sinks import PlainSink, Sink
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.typed import CachedValues

__all__ = ["BufferedOptions", "BufferedWriter"]


@dataclass(frozen=True, kw_only=True)
class BufferedOptions(CachedOptions):
    """Options of `buffered`."""


class BufferedWriter(CachedWriter):
    """pwritev straight from the image's memory into the page cache, then fsync."""

    name = "buffered"
    summary = "through the page cache, zero-copy pwritev, then fsync: the baseline"
    Options = BufferedOptions
    options: BufferedOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: BufferedOptions | None = None, **values: Unpack[CachedValues]
        ) -> None: ...

    def _sink(self, file: NewFile, meter: Meter) -> Sink:  # noqa: ARG002
        return PlainSink(file.fd, "buffered")

    def _source(self, fd: int, meter: Meter) -> Fill:  # noqa: ARG002
        def fill(views: list[Bytes], offset: int, own: Meter) -> None:
            own.count("buffered", sum(map(len, views)), pread_all(fd, views, offset))

        return fill
