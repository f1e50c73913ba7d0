"""The `uncached` writer: through the page cache, leaving no pages in it (RWF_DONTCACHE)."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from iobench.errors import UnavailableError
from iobench.writers.base import Availability
from iobench.writers.image import Bytes
from iobench.writers.local.dontcache import DontCache, dontcache_refusal, read_uncached
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.page_cache import CachedOptions, CachedWriter, Fill
from iobench.writers.local.sinks import PlainSink, PushingSink, Sink
from iobench.writers.options import option
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.typed import UncachedValues

__all__ = ["UncachedOptions", "UncachedWriter"]

_REMEDY = "Use method=auto, or Linux >= 6.14 on ext4 or xfs."


@dataclass(frozen=True, kw_only=True)
class UncachedOptions(CachedOptions):
    """Options of `uncached`."""

    method: str = option(
        "auto",
        choices=("auto", "dontcache", "sync_file_range"),
        help="RWF_DONTCACHE, or write-back by sync_file_range; auto: the first one that works",
    )


class UncachedWriter(CachedWriter):
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

    def available(self, target: str | Path = ".") -> Availability:
        answer = super().available(target)
        if not answer.ok or self.options.method == "sync_file_range":
            return answer
        with tempfile.TemporaryFile(dir=target) as file:
            refusal = dontcache_refusal(file.fileno())
        if refusal is None:
            return answer
        if self.options.method == "auto":
            return Availability(ok=True, reason=f"{refusal}; sync_file_range is used in its place.")
        return Availability(
            ok=False,
            reason=f"{refusal}.",
            remedy=_REMEDY,
        )

    def _sink(self, file: NewFile, meter: Meter) -> Sink:
        flags = self._dontcache_flags(file.fd, meter)
        return PlainSink(file.fd, "uncached", flags) if flags else PushingSink(file.fd)

    def _dontcache_flags(self, fd: int, meter: Meter) -> int:
        if self.options.method == "sync_file_range":
            return 0
        file = DontCache(fd)
        if self.options.method == "dontcache" and file.refusal is not None:
            raise UnavailableError(self.name, f"{file.refusal}.", _REMEDY)
        return file.flags(meter)

    def _source(self, fd: int, meter: Meter) -> Fill:
        flags = self._dontcache_flags(fd, meter)

        def fill(views: list[Bytes], offset: int, own: Meter) -> None:
            read_uncached(fd, views, offset, flags, own)

        return fill
