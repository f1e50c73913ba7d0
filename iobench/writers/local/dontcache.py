"""I/O through the page cache that leaves no pages in it: RWF_DONTCACHE, or sync and drop."""

from __future__ import annotations

import errno
import os
from functools import cached_property

from iobench import linux
from iobench.writers.image import Bytes
from iobench.writers.local.posix import pread_all
from iobench.writers.transfer import Meter

__all__ = ["DontCache", "dontcache_refusal", "on_storage", "read_uncached"]

_REFUSED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
# Of the three flags, WAIT_BEFORE is needed too: a page under write-back that is dirtied again is
# not written a second time without it (sync_file_range(2)).
_ON_STORAGE = (
    linux.SYNC_FILE_RANGE_WAIT_BEFORE
    | linux.SYNC_FILE_RANGE_WRITE
    | linux.SYNC_FILE_RANGE_WAIT_AFTER
)


def dontcache_refusal(fd: int) -> str | None:
    """Read a byte with RWF_DONTCACHE; return why the file refuses the flag, or None."""
    try:
        os.preadv(fd, [bytearray(1)], 0, linux.RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return f"RWF_DONTCACHE is refused ({error.strerror})"
    return None


class DontCache:
    """Whether one open file accepts RWF_DONTCACHE; probed once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @cached_property
    def refusal(self) -> str | None:
        """Why the file refuses the flag; None if it accepts it."""
        return dontcache_refusal(self._fd)

    def flags(self, meter: Meter) -> int:
        """Return RWF_DONTCACHE if the file accepts it; otherwise record a fallback and return 0."""
        if self.refusal is None:
            return linux.RWF_DONTCACHE
        meter.fell_back("uncached", "sync_file_range", self.refusal)
        return 0


def on_storage(fd: int, offset: int, length: int, *, drop: bool) -> None:
    """Wait until the range has reached the device; with `drop`, free its pages then."""
    linux.sync_file_range(fd, offset, length, _ON_STORAGE)
    if drop:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def read_uncached(fd: int, views: list[Bytes], offset: int, flags: int, meter: Meter) -> None:
    """Fill `views` and leave no page of the range. `flags` come from `DontCache.flags`."""
    length = sum(map(len, views))
    calls = pread_all(fd, views, offset, flags)
    if not flags:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    meter.count("uncached" if flags else "buffered+dontneed", length, calls)
