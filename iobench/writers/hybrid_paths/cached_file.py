"""CachedFile: I/O on one open file through the page cache, which may leave no pages in it."""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from iobench import linux
from iobench.errors import UnavailableError
from iobench.writers.hybrid_paths.policy import IoPath
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import round_up
from iobench.writers.local.posix import pread_all, pwrite_all
from iobench.writers.transfer import Meter

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


_PUSH_BEHIND = 4  # blocks under write-back before the oldest is awaited
_REMEDY = "Use method=auto, or Linux >= 6.14 on ext4 or xfs."


class DontCache:
    """Whether the files of one writer take RWF_DONTCACHE; each file system is asked once.

    `method`: RWF_DONTCACHE or nothing ("dontcache"), sync_file_range in its place, or "auto".
    """

    def __init__(self, writer: str, method: str = "auto") -> None:
        self._writer, self._method = writer, method
        self._refusals: dict[int, str | None] = {}

    def flags(self, fd: int, meter: Meter) -> int:
        """Return RWF_DONTCACHE, or 0 where the file refuses it, which is recorded as a fallback.

        Raises UnavailableError if there is to be no fallback.
        """
        if self._method == "sync_file_range":
            return 0
        device = os.fstat(fd).st_dev
        if device not in self._refusals:
            self._refusals[device] = dontcache_refusal(fd)
        refusal = self._refusals[device]
        if refusal is None:
            return linux.RWF_DONTCACHE
        if self._method == "dontcache":
            raise UnavailableError(self._writer, f"{refusal}.", _REMEDY)
        meter.fell_back("uncached", "sync_file_range", refusal)
        return 0


class CachedFile:
    """Moves ranges of a file by the paths BUFFERED and UNCACHED. Thread-safe.

    The caller owns `fd`. Written ranges are remembered until `leave` puts them on storage and
    drops their pages; a direct operation on the range is safe after that.
    """

    def __init__(self, fd: int, dontcache: DontCache, *, waits: bool = True) -> None:
        """`waits`: a write with UNCACHED returns when its bytes are on storage."""
        self._fd, self._dontcache, self._waits = fd, dontcache, waits
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []  # sorted, and none overlaps another one
        self._behind: deque[tuple[int, int]] = deque()

    def write(self, path: IoPath, part: Extent, meter: Meter) -> None:
        """Write `part`.

        On return its bytes are in the page cache. With UNCACHED they have also reached the device,
        like the bytes of a direct write, or are on their way to it until `finish`.
        """
        image, start, stop, offset = part
        with image.outgoing(start, stop, meter) as views:
            self.write_views(path, views, offset, stop - start, meter)

    def write_views(
        self, path: IoPath, views: list[Bytes], offset: int, length: int, meter: Meter
    ) -> None:
        """Write `length` bytes of consecutive `views` at `offset`; see `write`."""
        uncached = path == IoPath.UNCACHED
        if self._waits:
            with self._lock:
                among = self._overlapping(offset, offset + length)
                begins, ends = zip((offset, offset + length), *self._written[among], strict=True)
                self._written[among] = [(min(begins), max(ends))]
        flags = self._dontcache.flags(self._fd, meter) if uncached else 0
        with meter.operation("write"):
            calls = pwrite_all(self._fd, views, offset, flags)
            if uncached and self._waits:
                on_storage(self._fd, offset, length, drop=not flags)
            elif uncached and not flags:
                self._push(offset, length)
        meter.count("sync_file_range" if uncached and not flags else path, length, calls)

    def _push(self, offset: int, length: int) -> None:
        """Start the write-back of a block, and drop the pages of older blocks. One thread only.

        sync_file_range starts and awaits write-back, then POSIX_FADV_DONTNEED frees the clean
        pages. Kernels before 6.14 offer this in place of RWF_DONTCACHE.
        """
        linux.sync_file_range(self._fd, offset, length, linux.SYNC_FILE_RANGE_WRITE)
        self._behind.append((offset, length))
        if len(self._behind) > _PUSH_BEHIND:
            on_storage(self._fd, *self._behind.popleft(), drop=True)

    def finish(self) -> None:
        """Put the blocks under write-back on storage and drop their pages, after the last write."""
        while self._behind:
            on_storage(self._fd, *self._behind.popleft(), drop=True)

    def read(self, path: IoPath, part: Extent, meter: Meter) -> None:
        """Fill `part`; UNCACHED drops its pages afterwards."""
        image, start, stop, _ = part
        flags = self._dontcache.flags(self._fd, meter) if path == IoPath.UNCACHED else 0
        with image.incoming(start, stop, meter) as views, meter.operation("read"):
            if path == IoPath.UNCACHED:
                read_uncached(self._fd, views, start, flags, meter)
            else:
                meter.count(path, stop - start, pread_all(self._fd, views, start))

    def leave(self, start: int, stop: int) -> None:
        """Put the written ranges that overlap [start, stop) on storage and drop their pages."""
        with self._lock:
            among = self._overlapping(start, stop)
            overlapping = self._written[among]
            del self._written[among]
        for begin, end in overlapping:
            # posix_fadvise drops clean pages only, and whole ones only: sync, then round outwards.
            on_storage(self._fd, begin, end - begin, drop=False)
            page = begin - begin % linux.PAGE
            length = round_up(end, linux.PAGE) - page
            os.posix_fadvise(self._fd, page, length, os.POSIX_FADV_DONTNEED)

    def _overlapping(self, start: int, stop: int) -> slice:
        """Return where `_written` has the ranges that overlap [start, stop)."""
        first = bisect_right(self._written, start, key=lambda one: one[1])
        return slice(first, bisect_left(self._written, stop, lo=first, key=lambda one: one[0]))

    def held(self, ranges: Iterable[tuple[int, int]]) -> set[int]:
        """Return the starts of `ranges` that are in the page cache; none without cachestat(2).

        The ranges are in order. The kernel is asked about them alone: it looks at each page of a
        large file that is in memory. To be called once, before they are read: while a range is read
        from the page cache, the kernel reads the next one ahead, which then is there too. Of a file
        of 1 GB with only its header in the page cache, everything would be read through it.
        """
        ranges = list(ranges)
        first, last = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        if first == last or not self.resident_bytes(first, last - first):
            return set()
        return {a for a, b in ranges if self.resident_bytes(a, b - a) >= b - a}

    def resident_bytes(self, start: int, length: int) -> int:
        """Return how many of `length` > 0 bytes from `start` are in the page cache.

        Returns 0 where cachestat(2) fails: it needs Linux 6.5.
        """
        try:
            return linux.cachestat_resident_bytes(self._fd, start, length)
        except OSError:
            return 0
