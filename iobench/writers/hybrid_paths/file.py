"""HybridFile: one open file that is moved through the page cache or past it.

A write moves the whole pages first and then the rest of the last page:

    PathPolicy.choose ─┬─ buffered, uncached ─> CachedFile ──────────────────────> kernel
                       └─ direct ─> DirectEngine ─ in pieces ─> InFlight ─> Ring ─> kernel

The completion of a direct piece is taken when its thread writes the next range or waits:

    Ring ─> InFlight ─> RingEngine: returns the block to the pool ─> latch of the range, after its
    last piece ─> latch of the write ─> `on_complete`

When direct I/O is refused, that write and all later ones take another path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Self

from iobench import linux
from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.writers.direct.engine import CompletionLatch, DirectEngine, ignore
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.hybrid_paths.cached_file import CachedFile
from iobench.writers.hybrid_paths.memory_pressure import MemoryPressure, Pressure
from iobench.writers.hybrid_paths.policy import Decision, IoOperation, IoPath, PathPolicy, Position
from iobench.writers.image import Extent
from iobench.writers.local.direct_file import (
    REFUSED,
    DirectFile,
    aligned_view,
    direct_alignment,
    view_to_fill,
)

__all__ = ["HybridFile"]


class _RefusedError(Exception):
    """The file system refuses direct I/O; the message says why."""


class HybridFile:
    """Moves ranges of a file, each by the path that the policy chooses. Thread-safe.

    Ranges that are moved at the same time must not share a page. Then a cached and a direct
    operation never use one page at the same time. Ranges are cut at page boundaries. A direct
    write over pages that were written through the cache first waits until those are on storage,
    and drops them.

    `fd` is used for the page cache, and the caller closes it. The first direct operation opens the
    same file again with O_DIRECT. The engine of the calling thread carries out direct operations,
    at once or later. When direct I/O is refused, the whole file stops using it, and a fallback is
    recorded. Until one direct operation has succeeded, each one is awaited: a refusal is then
    known before the next operation begins.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        *,
        writing: bool,
        policy: PathPolicy,
        pressure: MemoryPressure,
        block_size: int,
        small_size: int,
    ) -> None:
        self._cached, self._name = CachedFile(fd), name
        self._reopen_path = f"/proc/self/fd/{fd}"  # the same file, even if its name changes
        self._writing = writing
        self._policy, self._pressure = policy, pressure
        self._block_size, self._small_size = block_size, small_size
        self._lock = threading.RLock()
        self._direct: DirectFile | None = None
        self._alignment = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
        self._proved = False
        """Whether a direct operation has succeeded."""

    def may_go_direct(self) -> bool:
        """Whether O_DIRECT may still be chosen for this file."""
        return self._policy.has(IoPath.DIRECT)

    def write(
        self, part: Extent, engine: DirectEngine, *, last: bool, on_complete: OnComplete = ignore
    ) -> None:
        """Write `part`, whose offset is a multiple of the page.

        `last` says that the file currently ends there. `on_complete` is called once, when all bytes
        are written or have failed: before this returns or raises, or when `engine` waits. See
        OnComplete.
        """
        pressure = self._pressure.now()
        with CompletionLatch(on_complete) as latch:
            self._prepare(IoOperation(size_bytes=part.size_bytes), pressure, engine)
            for one, position in self._cut(part, last=last):
                operation = IoOperation(
                    size_bytes=one.size_bytes,
                    position=position,
                    aligned=self._is_aligned(one.offset, one.size_bytes),
                    memory_aligned=aligned_view(one, self._alignment) is not None,
                )
                self._move(operation, pressure, one, engine, latch)

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
        return self._cached.held(ranges)

    def read(self, part: Extent, engine: DirectEngine, *, in_cache: bool = False) -> None:
        """Fill `part`, whose offset is a multiple of the page.

        `in_cache` says that `held` found it. The bytes are there on return or once `engine` has
        been drained.
        """
        image, start, stop, begin = part
        pressure = self._pressure.now()
        self._prepare(IoOperation(size_bytes=stop - start, in_cache=in_cache), pressure, engine)
        data = view_to_fill(part, self._alignment) if start == begin else None
        whole = begin == 0 and stop == image.size_bytes
        operation = IoOperation(
            size_bytes=stop - start,
            position=Position.WHOLE if whole else Position.FIRST if not begin else Position.MIDDLE,
            aligned=begin % self._alignment.offset == 0,  # the length is rounded up in a block
            memory_aligned=data is not None,
            in_cache=in_cache,
        )
        with CompletionLatch(part.filled) as latch:
            self._move(operation, pressure, part, engine, latch)

    def _prepare(self, likely: IoOperation, pressure: Pressure, engine: DirectEngine) -> None:
        """Open the file for direct I/O before the first operation that may take this path.

        Its alignment, which may be larger than a page, decides where ranges are cut and by which
        path they go.
        """
        if self._direct is None and self._policy.choose(likely, pressure).path == IoPath.DIRECT:
            try:
                self._open_direct()
            except _RefusedError as error:
                self._give_up_direct(likely, pressure, engine, error)

    def _give_up_direct(
        self,
        operation: IoOperation,
        pressure: Pressure,
        engine: DirectEngine,
        why: _RefusedError,
    ) -> Decision:
        """Take another path for this and all later operations; raise if there is none."""
        if not self._policy.drop(IoPath.DIRECT):
            raise TransferError(f"{self._name}: {why}, no other path is left") from why
        decision = self._policy.choose(operation, pressure)
        engine.meter.fell_back(IoPath.DIRECT, decision.path, str(why))
        return decision

    def _move(
        self,
        operation: IoOperation,
        pressure: Pressure,
        part: Extent,
        engine: DirectEngine,
        latch: CompletionLatch,
    ) -> None:
        """Move by the path that the policy chooses; if direct I/O is refused, by another one."""
        decision = self._policy.choose(operation, pressure)
        if decision.path == IoPath.DIRECT:
            try:
                self._go_direct(part, engine, latch)
            except _RefusedError as error:
                decision = self._give_up_direct(operation, pressure, engine, error)
        if decision.path != IoPath.DIRECT:
            go = self._cached.write if self._writing else self._cached.read
            go(decision.path, part, engine.meter)
        engine.meter.decided(decision.path, decision.reason)

    def _go_direct(self, part: Extent, engine: DirectEngine, latch: CompletionLatch) -> None:
        file, offset, size_bytes = self._open_direct(), part.offset, part.size_bytes
        if self._writing:
            if not self._is_aligned(offset, size_bytes):  # and no path but this one is left
                raise _RefusedError(f"direct I/O needs multiples of {file.alignment.offset} bytes")
            # The kernel drops cached pages of the range where it can, not always (open(2), NOTES).
            self._cached.leave(offset, offset + size_bytes)
        go = engine.write if self._writing else engine.read
        latch.add()
        if self._proved:
            go(file, part, latch.end)
            return
        outcome = list[bool]()

        def completed(ok: bool) -> None:
            outcome.append(ok)
            latch.end(True)  # this call raises the failure, or repeats the operation

        try:
            try:
                go(file, part, completed)
            finally:
                engine.drain()
        except OSError as error:
            if outcome:  # else the ring failed, and the kernel may still use the memory
                _raise_refusal("direct I/O", error)
            raise
        self._proved = True
        if self._writing and self._cached.resident_bytes(offset, size_bytes):
            why = "O_DIRECT is accepted, yet goes through the page cache"
            if self._policy.drop(IoPath.DIRECT):
                engine.meter.fell_back(IoPath.DIRECT, "page cache", why)

    def _is_aligned(self, offset: int, length: int) -> bool:
        return not (offset | length) % self._alignment.offset

    def _open_direct(self) -> DirectFile:
        with self._lock:
            if self._direct is None:
                self._direct = self._opened_direct()
                self._alignment = self._direct.alignment
            return self._direct

    def _opened_direct(self) -> DirectFile:
        flags = os.O_WRONLY if self._writing else os.O_RDONLY
        try:
            fd = os.open(self._reopen_path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except FileNotFoundError as error:  # not of the file, which is open
            raise _RefusedError("O_DIRECT needs /proc, which is not mounted") from error
        except OSError as error:
            _raise_refusal("opening with O_DIRECT", error)
            raise
        try:
            return DirectFile(fd=fd, alignment=direct_alignment("direct", fd, self._block_size))
        except UnavailableError as error:
            os.close(fd)
            raise _RefusedError(error.reason.rstrip(".")) from error
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor for direct I/O, if it was opened."""
        with self._lock:
            file, self._direct = self._direct, None
        if file is not None:
            os.close(file.fd)


def _raise_refusal(doing: str, error: OSError) -> None:
    """Raise _RefusedError if `error` means that the file system has no direct I/O."""
    if error.errno in REFUSED and not isinstance(error, IobenchError):
        raise _RefusedError(f"{doing} is refused ({error.strerror})") from error
