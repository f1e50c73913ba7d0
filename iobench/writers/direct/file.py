"""PathFile: one open file that is moved through the page cache or past it, by its FileSetting.

A write of several paths moves the whole pages first and then the rest of the last page:

    FileSetting.choose ─┬─ buffered, uncached ─> write_cached ─────────> kernel
                        └─ direct ─> DirectEngine ─ in pieces ─> Ring ─> kernel

The completion of a direct piece is taken when its thread writes the next range or waits:

    Ring ─> RingEngine: returns the block to the pool ─> latch of the range, after its last piece ─>
    latch of the write ─> `on_complete`
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from iobench import linux
from iobench.errors import IobenchError, UnavailableError
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.direct.engine import CompletionLatch, DirectEngine, OnComplete, ignore
from iobench.writers.image import Extent
from iobench.writers.local.direct_file import (
    REFUSED,
    DirectFile,
    reopened,
)
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


_PUSH_BEHIND = 4  # blocks under write-back before the oldest is awaited
_REMEDY = "Use method=auto, or Linux >= 6.14 on ext4 or xfs."


class IoPath(StrEnum):
    """The paths between memory and storage."""

    DIRECT = "direct"
    """O_DIRECT: past the page cache, with the least CPU time, for aligned blocks only."""
    UNCACHED = "uncached"
    """Through the page cache. On return the bytes are on storage and their pages are dropped."""
    BUFFERED = "buffered"
    """Through the page cache, which keeps the bytes."""


@dataclass(frozen=True, kw_only=True)
class FileSetting:
    """How a FileWriter moves a file."""

    paths: tuple[IoPath, ...]
    """Paths of large operations. One alone is never left: the writer raises where it is refused."""
    block_size: int
    threads: int = 1
    """Workers without a ring, each with one block in flight."""
    rings: int = 0
    """Threads with a ring each for direct operations; 0: none."""
    iodepth: int = 0
    """Pieces in flight on each ring."""
    piece_size: int = 0
    stream_depth: int = 0
    """Blocks of a stream in flight."""
    small_size: int = 1
    """With several paths, a file or a tail below this size goes through the page cache."""
    read_soon: bool = False
    o_direct: bool = True
    """Without it, the path DIRECT is the ring's way through the page cache."""
    dontcache: str = "auto"

    @property
    def only(self) -> IoPath | None:
        """The path if there is no choice."""
        return self.paths[0] if len(self.paths) == 1 else None

    @property
    def cached(self) -> bool:
        """Whether everything goes through the page cache by one path."""
        return self.only in (IoPath.BUFFERED, IoPath.UNCACHED)

    def choose(
        self, size_bytes: int, *, aligned: bool = True, in_cache: bool = False
    ) -> tuple[IoPath, str]:
        """Return the path of one operation, and the reason in a few words.

        `aligned` describes its offset and length. `in_cache` says of a read that the page cache has
        all bytes. Small operations go through the page cache: a direct write of a few KiB waits for
        the device on its own, while write-back combines it with others. Large operations go past
        the cache, by O_DIRECT where it works. Trying the other path now and then was no faster
        (docs/decisions/0020).
        """
        if in_cache and IoPath.BUFFERED in self.paths:
            return IoPath.BUFFERED, "in the page cache"
        if size_bytes < self.small_size:
            return self._first(IoPath.BUFFERED, IoPath.UNCACHED), "small"
        if self.read_soon and IoPath.BUFFERED in self.paths:
            return IoPath.BUFFERED, "read soon"
        if not aligned:
            return self._first(IoPath.UNCACHED, IoPath.BUFFERED), "unaligned"
        return self._first(IoPath.DIRECT, IoPath.UNCACHED), "large"

    def _first(self, *wanted: IoPath) -> IoPath:
        return next((path for path in wanted if path in self.paths), self.paths[0])


class PathSupport:
    """What the file systems of one writer's files take. Each is asked once."""

    def __init__(self, writer: str, dontcache: str = "auto") -> None:
        """`writer` is named in errors. `dontcache` is the option `method` of `uncached`."""
        self.writer, self._method = writer, dontcache
        self._no_dontcache: dict[int, str | None] = {}
        self.direct: dict[tuple[int, str, bool], str] = {}
        """By device, directory and direction, why direct I/O is not used there; empty: it is."""

    def dontcache(self, fd: int, meter: Meter) -> int:
        """Return RWF_DONTCACHE, or 0 where the file refuses it, which is recorded as a fallback.

        Raises UnavailableError if there is to be no fallback.
        """
        if self._method == "sync_file_range":
            return 0
        device = os.fstat(fd).st_dev
        if device not in self._no_dontcache:
            self._no_dontcache[device] = dontcache_refusal(fd)
        refusal = self._no_dontcache[device]
        if refusal is None:
            return linux.RWF_DONTCACHE
        if self._method == "dontcache":
            raise UnavailableError(self.writer, f"{refusal}.", _REMEDY)
        meter.fell_back("uncached", "sync_file_range", refusal)
        return 0


_BYTES = linux.DioAlignment(memory=1, offset=1)
_PAGES = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)


class PathFile:
    """Moves ranges of a file by one path, or each by the path that the policy chooses. Thread-safe.

    With several paths, ranges that are moved at the same time must not share a page. Then a cached
    and a direct operation never use one page at the same time. Ranges are cut at page boundaries. A
    direct write over pages that were written through the cache first waits until those are on
    storage, and drops them.

    `fd` is used for the page cache, and the caller closes it. The first direct operation opens the
    same file again with O_DIRECT. The engine of the calling thread carries out direct operations,
    at once or later. The first one on a file system is tried before: a refusal is a fallback, and
    the file takes another path.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        how: FileSetting,
        support: PathSupport,
        *,
        writing: bool,
    ) -> None:
        """With the path DIRECT alone, raises UnavailableError where O_DIRECT is refused."""
        self._fd, self.name, self._writing = fd, name, writing
        self._how, self._only, self._support = how, how.only, support
        self._lock = threading.RLock()
        self._written = False  # through the page cache, which may have the pages
        self._behind: deque[tuple[int, int]] = deque()
        self._direct: DirectFile | None = None
        if self._only is IoPath.DIRECT:
            self._direct = self._reopened() if how.o_direct else DirectFile(fd, _BYTES, name)

    @property
    def unit(self) -> int:
        """Where ranges begin: at multiples of it. 1 without direct I/O."""
        return 1 if self._direct is None else self._direct.alignment.offset

    @property
    def _alignment(self) -> linux.DioAlignment:
        """What direct I/O needs. Not a second attribute: no lock is held where it is read."""
        direct = self._direct
        return _PAGES if direct is None else direct.alignment

    def may_go_direct(self) -> bool:
        """Whether direct I/O may still be chosen for this file."""
        return IoPath.DIRECT in self._how.paths

    def write(self, part: Extent, engine: DirectEngine, on_complete: OnComplete = ignore) -> None:
        """Write `part`, whose offset is a multiple of the page, or of the block with one path.

        `on_complete` is called once, when all bytes are written or have failed: before this returns
        or raises, or when `engine` waits. See OnComplete. With the path DIRECT alone, padding may
        follow the last byte.
        """
        with CompletionLatch(on_complete) as latch:
            self._prepare(part, engine.meter)
            for one in self._cut(part):
                aligned = not (one.offset | one.size_bytes) % self._alignment.offset
                path = self._choose(one, engine.meter, aligned=aligned)
                if path is IoPath.DIRECT:
                    assert self._direct is not None
                    # The kernel drops cached pages of the range where it can, not always (open(2),
                    # NOTES).
                    self.leave(one.offset, one.offset + one.size_bytes)
                    engine.write(self._direct, one, latch.part())
                else:
                    self.write_cached(path, one, engine.meter)

    def _choose(
        self, part: Extent, meter: Meter, *, aligned: bool, in_cache: bool = False
    ) -> IoPath:
        """Return the path of one operation; if there is a choice, `meter` counts it."""
        path, reason = self._how.choose(part.size_bytes, aligned=aligned, in_cache=in_cache)
        if self._only is None:
            meter.decided(path, reason)
        return path

    def _cut(self, part: Extent) -> list[Extent]:
        """Cut one write into operations: all of it, or whole pages and the rest of the last one."""
        # O_DIRECT needs whole sectors: the rest would be padded and the file truncated again.
        rest = part.size_bytes % max(linux.PAGE, self._alignment.offset)
        if self._only or not rest or part.size_bytes < self._how.small_size:
            return [part]
        middle, offset = part.stop - rest, part.offset + part.size_bytes - rest
        return [part._replace(stop=middle), part._replace(start=middle, offset=offset)]

    def read(self, part: Extent, engine: DirectEngine, *, in_cache: bool = False) -> None:
        """Fill `part`, whose offset is a multiple of the page, or of the block with one path.

        `in_cache` says that `held` found it. The bytes are there on return or once `engine` has
        waited.
        """
        with CompletionLatch(part.filled) as latch:
            self._prepare(part, engine.meter, in_cache=in_cache)
            aligned = not part.offset % self._alignment.offset  # a block has the rounded-up length
            path = self._choose(part, engine.meter, aligned=aligned, in_cache=in_cache)
            if path is IoPath.DIRECT:
                assert self._direct is not None
                engine.read(self._direct, part, latch.part())
            else:
                self.read_cached(path, part, engine.meter)

    def write_cached(self, path: IoPath, part: Extent, meter: Meter) -> None:
        """Write `part` by the path BUFFERED or UNCACHED.

        On return its bytes are in the page cache. With UNCACHED they have also reached the device,
        like the bytes of a direct write; without a choice of paths they are on their way to it
        until `finish`.
        """
        image, start, stop, offset = part
        length, uncached = stop - start, path == IoPath.UNCACHED
        self._written = True
        flags = self._support.dontcache(self._fd, meter) if uncached else 0
        with image.outgoing(start, stop, meter) as views, meter.operation("write"):
            calls = pwrite_all(self._fd, views, offset, flags)
            if uncached and self._only is None:
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

    def read_cached(self, path: IoPath, part: Extent, meter: Meter) -> None:
        """Fill `part` by the path BUFFERED or UNCACHED, which drops its pages afterwards."""
        image, start, stop, _ = part
        uncached = path == IoPath.UNCACHED
        flags = self._support.dontcache(self._fd, meter) if uncached else 0
        with image.incoming(start, stop, meter) as views, meter.operation("read"):
            calls = pread_all(self._fd, views, start, flags)
            if uncached and not flags:
                os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)
            meter.count(
                "buffered+dontneed" if uncached and not flags else path, stop - start, calls
            )

    def leave(self, start: int, stop: int) -> None:
        """Put the whole pages of [start, stop) on storage and drop them, if any was written."""
        if self._written:  # posix_fadvise drops clean pages only
            on_storage(self._fd, start, stop - start, drop=True)

    def held(self, ranges: Iterable[tuple[int, int]]) -> set[int]:
        """Return the starts of `ranges` that are in the page cache; none without cachestat(2).

        The ranges are in order. The kernel is asked about them alone: it looks at each page of a
        large file that is in memory. To be called once, before they are read: while a range is read
        from the page cache, the kernel reads the next one ahead, which then is there too. Of a file
        of 1 GB with only its header in the page cache, everything would be read through it.
        """
        ranges = list(ranges) if self._only is None else []  # else there is no choice
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

    def _prepare(self, part: Extent, meter: Meter, *, in_cache: bool = False) -> None:
        """Open the file for direct I/O if `part` would take that path.

        The alignment of direct I/O decides then where `part` is cut, and whether it is aligned.
        """
        path, _ = self._how.choose(part.size_bytes, in_cache=in_cache)
        if path is not IoPath.DIRECT or self._direct is not None:
            return
        with self._lock:
            if self._direct is None and (refusal := self._open_direct(part.offset)):
                left = tuple(one for one in self._how.paths if one is not IoPath.DIRECT)
                self._how = replace(self._how, paths=left)  # in one step, as no lock is held
                path, _ = self._how.choose(part.size_bytes)
                meter.fell_back(IoPath.DIRECT, path, refusal)

    def _reopened(self) -> DirectFile:
        flags = os.O_WRONLY if self._writing else os.O_RDONLY
        support, how = self._support, self._how
        return reopened(self._fd, flags, support.writer, self.name, how.block_size)

    def _open_direct(self, offset: int) -> str:
        """Open the file with O_DIRECT; return why it goes another way, or an empty text."""
        where = os.fstat(self._fd).st_dev, os.path.dirname(self.name), self._writing
        refusal = self._support.direct.get(where)
        if refusal:
            return refusal
        try:
            file = self._reopened()
        except UnavailableError as error:
            refusal = self._support.direct[where] = error.reason.rstrip(".")
            return refusal
        try:
            if refusal is None and not offset % file.alignment.offset:
                refusal = self._support.direct[where] = self._tried(file, offset)
        except BaseException:
            os.close(file.fd)
            raise
        if refusal:
            os.close(file.fd)
            return refusal
        self._direct = file
        return ""

    def _tried(self, file: DirectFile, offset: int) -> str:
        """Move one unit at `offset`, which is moved again after that; return why direct I/O fails.

        A file system may take O_DIRECT in open(2) and refuse the operation, or use the page cache.
        """
        unit = file.alignment.offset
        block = fresh_pages(unit, huge=False)
        try:
            if not self._writing:
                if os.fstat(file.fd).st_size > offset:
                    pread_all(file.fd, [block], offset, wanted=1, unit=unit)
                return ""
            self.leave(offset, offset + unit)
            pwrite_all(file.fd, [block], offset, unit=unit)
        except OSError as error:
            if error.errno not in REFUSED or isinstance(error, IobenchError):
                raise
            return f"direct I/O is refused ({error.strerror})"
        if self.resident_bytes(offset, unit):
            return "O_DIRECT is accepted, yet goes through the page cache"
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor for direct I/O, if it was opened."""
        with self._lock:
            file, self._direct = self._direct, None
        if file is not None and file.fd != self._fd:
            os.close(file.fd)
