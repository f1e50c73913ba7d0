"""I/O through the page cache that leaves no pages in it: RWF_DONTCACHE, or sync and drop."""

from __future__ import annotations

import errno
import os

from iobench import linux
from iobench.writers.image import Bytes
from iobench.writers.local.posix import pread_all
from iobench.writers.transfer import Meter

__all__ = ["dontcache_refusal", "on_storage", "read_uncached"]

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


def on_storage(fd: int, offset: int, length: int, *, drop: bool) -> None:
    """Wait until the range has reached the device; with `drop`, free its pages then."""
    linux.sync_file_range(fd, offset, length, _ON_STORAGE)
    if drop:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def read_uncached(fd: int, views: list[Bytes], offset: int, flags: int, meter: Meter) -> None:
    """Fill `views` and leave no page of the range. `flags`: RWF_DONTCACHE, or 0 without it."""
    length = sum(map(len, views))
    calls = pread_all(fd, views, offset, flags)
    if not flags:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    meter.count("uncached" if flags else "buffered+dontneed", length, calls)
