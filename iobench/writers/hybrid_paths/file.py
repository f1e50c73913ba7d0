"""PathFile: one open file that is moved through the page cache or past it.

A write of several paths moves the whole pages first and then the rest of the last page:

    PathPolicy.choose ─┬─ buffered, uncached ─> CachedFile ──────────────────────> kernel
                       └─ direct ─> DirectEngine ─ in pieces ─> InFlight ─> Ring ─> kernel

The completion of a direct piece is taken when its thread writes the next range or waits:

    Ring ─> InFlight ─> RingEngine: returns the block to the pool ─> latch of the range, after its
    last piece ─> latch of the write ─> `on_complete`
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from iobench import linux
from iobench.errors import IobenchError, UnavailableError
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.direct.engine import CompletionLatch, DirectEngine, ignore
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.hybrid_paths.cached_file import CachedFile, DontCache
from iobench.writers.hybrid_paths.policy import (
    Decision,
    IoOperation,
    IoPath,
    MemoryPressure,
    PathPolicy,
    Position,
    Pressure,
)
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import (
    REFUSED,
    DirectFile,
    aligned_view,
    direct_alignment,
    pread_direct,
    pwrite_direct,
    view_to_fill,
)
from iobench.writers.transfer import Meter

_PAGES = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)


@dataclass(kw_only=True)
class PathSupport:
    """What the file systems of one writer's files take. Each is asked once."""

    dontcache: DontCache
    pressure: MemoryPressure = field(default_factory=MemoryPressure)
    direct: set[tuple[int, bool]] = field(default_factory=set)
    """The devices on which direct writes (True) or reads have worked."""
    refusals: dict[tuple[int, str, bool], str] = field(default_factory=dict)
    """By device, directory and direction, why direct I/O is not used there."""


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
        *,
        writing: bool,
        paths: tuple[IoPath, ...],
        support: PathSupport,
        block_size: int,
        small_size: int = 1,
        read_soon: bool = False,
        direct: DirectFile | None = None,
    ) -> None:
        """`direct` is for files of the path DIRECT alone: the descriptor `fd` is used for it."""
        self._fd, self.name, self._writing = fd, name, writing
        self._only = paths[0] if len(paths) == 1 else None
        self._policy = PathPolicy(paths, small_size=small_size, read_soon=read_soon)
        self._support, self._block_size, self._small_size = support, block_size, small_size
        self._cached = CachedFile(fd, support.dontcache, waits=self._only is None)
        self._lock = threading.RLock()
        self._direct = direct

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
        return self._policy.has(IoPath.DIRECT)

    def write(
        self, part: Extent, engine: DirectEngine, *, last: bool, on_complete: OnComplete = ignore
    ) -> None:
        """Write `part`, whose offset is a multiple of the page, or of the block with one path.

        `last` says that the file currently ends there. `on_complete` is called once, when all bytes
        are written or have failed: before this returns or raises, or when `engine` waits. See
        OnComplete. With the path DIRECT alone, padding may follow the last byte.
        """
        if self._only is IoPath.DIRECT:
            assert self._direct is not None
            engine.write(self._direct, part, on_complete)
            return
        with CompletionLatch(on_complete) as latch:
            if self._only is not None:
                self._cached.write(self._only, part, engine.meter)
                return
            pressure = self._support.pressure.now()
            likely = IoOperation(size_bytes=part.size_bytes)
            self._chosen(likely, pressure, part.offset, engine.meter)
            for one, position in self._cut(part, last=last):
                operation = IoOperation(
                    size_bytes=one.size_bytes,
                    position=position,
                    aligned=not (one.offset | one.size_bytes) % self._alignment.offset,
                    memory_aligned=aligned_view(one, self._alignment) is not None,
                )
                decision = self._chosen(operation, pressure, one.offset, engine.meter)
                if decision.path is IoPath.DIRECT:
                    assert self._direct is not None
                    # The kernel drops cached pages of the range where it can, not always (open(2),
                    # NOTES).
                    self._cached.leave(one.offset, one.offset + one.size_bytes)
                    latch.add()
                    engine.write(self._direct, one, latch.end)
                else:
                    self._cached.write(decision.path, one, engine.meter)
                engine.meter.decided(decision.path, decision.reason)

    def write_views(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        """Write consecutive `views` at `offset` through the page cache; see `write`."""
        assert self._only is not None
        self._cached.write_views(self._only, views, offset, sum(map(len, views)), meter)

    def _cut(self, part: Extent, *, last: bool) -> Iterator[tuple[Extent, Position]]:
        """Cut one write into operations: all of it, or whole pages and the rest of the last one."""
        position = Position.MIDDLE if part.offset else Position.FIRST
        # O_DIRECT needs whole sectors: the rest would be padded and the file truncated again.
        rest = part.size_bytes % max(linux.PAGE, self._alignment.offset)
        if rest and part.size_bytes >= self._small_size:
            middle = part.stop - rest
            yield part._replace(stop=middle), position
            offset = part.offset + middle - part.start
            yield part._replace(start=middle, offset=offset), Position.TAIL
        elif last:
            yield part, Position.TAIL if part.offset else Position.WHOLE
        else:
            yield part, position

    def held(self, ranges: Iterable[tuple[int, int]]) -> set[int]:
        """Return the starts of `ranges` that are in the page cache; see `CachedFile.held`."""
        return self._cached.held(ranges) if self._only is None else set()

    def read(self, part: Extent, engine: DirectEngine, *, in_cache: bool = False) -> None:
        """Fill `part`, whose offset is a multiple of the page, or of the block with one path.

        `in_cache` says that `held` found it. The bytes are there on return or once `engine` has
        waited.
        """
        if self._only is IoPath.DIRECT:
            assert self._direct is not None
            engine.read(self._direct, part, part.filled)
            return
        with CompletionLatch(part.filled) as latch:
            if self._only is not None:
                self._cached.read(self._only, part, engine.meter)
                return
            (image, start, stop, begin), pressure = part, self._support.pressure.now()
            likely = IoOperation(size_bytes=stop - start, in_cache=in_cache)
            self._chosen(likely, pressure, begin, engine.meter)
            data = view_to_fill(part, self._alignment) if start == begin else None
            whole = begin == 0 and stop == image.size_bytes
            operation = IoOperation(
                size_bytes=stop - start,
                position=Position.WHOLE
                if whole
                else Position.FIRST
                if not begin
                else Position.MIDDLE,
                aligned=begin % self._alignment.offset == 0,  # the length is rounded up in a block
                memory_aligned=data is not None,
                in_cache=in_cache,
            )
            decision = self._chosen(operation, pressure, begin, engine.meter)
            if decision.path is IoPath.DIRECT:
                assert self._direct is not None
                latch.add()
                engine.read(self._direct, part, latch.end)
            else:
                self._cached.read(decision.path, part, engine.meter)
            engine.meter.decided(decision.path, decision.reason)

    def finish(self) -> None:
        """Finish what is on its way through the page cache, after the last write."""
        self._cached.finish()

    def _chosen(
        self, operation: IoOperation, pressure: Pressure, offset: int, meter: Meter
    ) -> Decision:
        """Choose the path of an operation at `offset`; open the file for direct I/O if needed.

        A write asks for itself before it is cut: the alignment of direct I/O, which may be larger
        than a page, decides where.
        """
        decision = self._policy.choose(operation, pressure)
        if decision.path is not IoPath.DIRECT or self._direct is not None:
            return decision
        with self._lock:
            if self._direct is None and (refusal := self._open_direct(offset)):
                self._policy.drop(IoPath.DIRECT)
                decision = self._policy.choose(operation, pressure)
                meter.fell_back(IoPath.DIRECT, decision.path, refusal)
        return decision

    def _open_direct(self, offset: int) -> str:
        """Open the file with O_DIRECT; return why it goes another way, or an empty text."""
        works = os.fstat(self._fd).st_dev, self._writing
        where = works[0], os.path.dirname(self.name), self._writing
        if refusal := self._support.refusals.get(where, ""):
            return refusal
        flags = os.O_WRONLY if self._writing else os.O_RDONLY
        try:
            # The same file, even if its name changes.
            fd = os.open(f"/proc/self/fd/{self._fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
        except FileNotFoundError:  # not of the file, which is open
            return "O_DIRECT needs /proc, which is not mounted"
        except OSError as error:
            return _refusal("opening with O_DIRECT", error)
        try:
            alignment = direct_alignment("direct", fd, self._block_size)
            file = DirectFile(fd=fd, alignment=alignment, name=self.name)
            if works not in self._support.direct and not offset % alignment.offset:
                refusal = self._tried(file, offset)
        except UnavailableError as error:
            refusal = error.reason.rstrip(".")
        except BaseException:
            os.close(fd)
            raise
        if refusal:
            os.close(fd)
            self._support.refusals[where] = refusal
            return refusal
        if not offset % alignment.offset:
            self._support.direct.add(works)
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
                    pread_direct(file.fd, block, offset, 1, unit)
                return ""
            self._cached.leave(offset, offset + unit)
            pwrite_direct(file.fd, block, offset, unit)
        except OSError as error:
            return _refusal("direct I/O", error)
        if self._cached.resident_bytes(offset, unit):
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


def _refusal(doing: str, error: OSError) -> str:
    """Return why the file system has no direct I/O. Raises `error` if it means something else."""
    if error.errno not in REFUSED or isinstance(error, IobenchError):
        raise error
    return f"{doing} is refused ({error.strerror})"
