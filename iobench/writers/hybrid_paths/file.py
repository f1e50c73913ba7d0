"""HybridFile: one open file that is moved through the page cache or past it.

A write moves the whole pages first and then the rest of the last page:

    PathPolicy.choose ─┬─ buffered, uncached ─> CachedFile ──────────────────────> kernel
                       └─ direct ─> DirectEngine ─ in pieces ─> InFlight ─> Ring ─> kernel

The completion of a direct piece is taken when its thread writes the next range or waits:

    Ring ─> InFlight ─> RingEngine: returns the block to the pool ─> latch of the range, after its
    last piece ─> HybridFile: learns the rate ─> latch of the write ─> `on_complete`

When direct I/O is refused, that write and all later ones take another path.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from iobench import linux
from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.writers.direct.engine import CompletionLatch, DirectEngine, ignore
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.hybrid_paths.cached_file import CachedFile
from iobench.writers.hybrid_paths.memory_pressure import MemoryPressure
from iobench.writers.hybrid_paths.policy import IoOperation, IoPath, PathPolicy, Position
from iobench.writers.image import FileImage
from iobench.writers.local.direct_file import REFUSED, DirectFile, aligned_view, direct_alignment
from iobench.writers.transfer import Meter

__all__ = ["HybridFile"]


class _RefusedError(Exception):
    """The file system refuses direct I/O; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """One operation at `offset`: a function for each path, and the latch of the call."""

    operation: IoOperation
    offset: int
    direct: Callable[[DirectFile, OnComplete], None]
    cached: Callable[[IoPath], None]
    meter: Meter
    engine: DirectEngine
    latch: CompletionLatch


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
        self,
        image: FileImage,
        start: int,
        stop: int,
        meter: Meter,
        engine: DirectEngine,
        *,
        at: int,
        last: bool,
        on_complete: OnComplete = ignore,
    ) -> None:
        """Write bytes [start, stop) of `image` at offset `at` of the file, a multiple of the page.

        `last` says that the file currently ends there. `on_complete` is called once, when all bytes
        are written or have failed: before this returns or raises, or when `engine` waits. See
        OnComplete.
        """
        with CompletionLatch(on_complete) as latch:
            for begin, end, position in self._cut(start, stop, at, last=last):
                self._write(image, begin, end, position, meter, engine, at + begin - start, latch)

    def _write(
        self,
        image: FileImage,
        start: int,
        stop: int,
        position: Position,
        meter: Meter,
        engine: DirectEngine,
        offset: int,
        latch: CompletionLatch,
    ) -> None:
        operation = IoOperation(
            size_bytes=stop - start,
            position=position,
            aligned=self._is_aligned(offset, stop - start),
            memory_aligned=aligned_view(image, start, stop, self._alignment) is not None,
        )

        def direct(file: DirectFile, on_complete: OnComplete) -> None:
            engine.write(file, image, start, stop, at=offset, on_complete=on_complete)

        def cached(path: IoPath) -> None:
            self._cached.write(path, image, start, stop, offset, meter)

        self._move(
            _Move(
                operation=operation,
                offset=offset,
                direct=direct,
                cached=cached,
                meter=meter,
                engine=engine,
                latch=latch,
            )
        )

    def _cut(
        self, start: int, stop: int, at: int, *, last: bool
    ) -> Iterator[tuple[int, int, Position]]:
        """Cut one write into operations: all of it, or whole pages and the rest of the last one."""
        position = Position.MIDDLE if at else Position.FIRST
        if last:
            position = Position.TAIL if at else Position.WHOLE
        # O_DIRECT needs whole sectors: the rest would be padded and the file truncated again.
        rest = (stop - start) % max(linux.PAGE, self._alignment.offset)
        if not rest or stop - start < self._small_size:
            yield start, stop, position
        else:
            yield start, stop - rest, Position.MIDDLE if at else Position.FIRST
            yield stop - rest, stop, Position.TAIL

    def read(
        self,
        image: FileImage,
        begin: int,
        wanted: int,
        stop: int,
        meter: Meter,
        engine: DirectEngine,
    ) -> None:
        """Fill bytes [wanted, stop) of `image`, reading from `begin` <= `wanted`.

        `begin` is a multiple of the page. The bytes are there on return or once `engine` has been
        drained.
        """
        data = aligned_view(image, wanted, stop, self._alignment) if wanted == begin else None
        whole = begin == 0 and stop == image.size_bytes
        operation = IoOperation(
            size_bytes=stop - wanted,
            position=Position.WHOLE if whole else Position.FIRST if not begin else Position.MIDDLE,
            aligned=begin % self._alignment.offset == 0,  # the length is rounded up in a block
            memory_aligned=data is not None,
            in_cache=self._cached.holds(wanted, stop),
        )

        def direct(file: DirectFile, on_complete: OnComplete) -> None:
            engine.read(file, image, begin, wanted, stop, on_complete=on_complete)

        def cached(path: IoPath) -> None:
            self._cached.read(path, image, wanted, stop, meter)

        with CompletionLatch(ignore) as latch:
            self._move(
                _Move(
                    operation=operation,
                    offset=begin,
                    direct=direct,
                    cached=cached,
                    meter=meter,
                    engine=engine,
                    latch=latch,
                )
            )

    def _move(self, move: _Move) -> None:
        """Move by the path that the policy chooses; if direct I/O is refused, by another one."""
        decision = self._policy.choose(move.operation, self._pressure.now())
        if decision.path == IoPath.DIRECT:
            try:
                self._go_direct(move)
            except _RefusedError as error:
                if not self._policy.drop(IoPath.DIRECT):
                    raise TransferError(f"{self._name}: {error}, no other path is left") from error
                decision = self._policy.choose(move.operation, self._pressure.now())
                move.meter.fell_back(IoPath.DIRECT, decision.path, str(error))
        if decision.path != IoPath.DIRECT:
            self._go_cached(decision.path, move)
        move.meter.decided(decision.path, decision.reason)

    def _go_cached(self, path: IoPath, move: _Move) -> None:
        if path == IoPath.UNCACHED:
            move.engine.drain()  # their time must not count for this path
        began = time.perf_counter()
        move.cached(path)
        self._policy.learn(path, move.operation.size_bytes, time.perf_counter() - began)

    def _go_direct(self, move: _Move) -> None:
        file, size_bytes = self._open_direct(), move.operation.size_bytes
        if self._writing:
            if not self._is_aligned(move.offset, size_bytes):  # known since the file was opened
                raise _RefusedError(f"direct I/O needs multiples of {file.alignment.offset} bytes")
            # The kernel drops cached pages of the range where it can, not always (open(2), NOTES).
            self._cached.leave(move.offset, move.offset + size_bytes)
        # Little's law: an operation that shares the device counts for its share of the time.
        share = size_bytes / (size_bytes + move.engine.bytes_in_flight)
        began, awaited, outcome = time.perf_counter(), not self._proved, list[bool]()

        def completed(ok: bool) -> None:
            outcome.append(ok)
            if ok:
                seconds = (time.perf_counter() - began) * share
                self._policy.learn(IoPath.DIRECT, size_bytes, seconds)
            move.latch.end(ok or awaited)  # an awaited operation raises, or is repeated

        move.latch.add()
        if not awaited:
            move.direct(file, completed)
            return
        try:
            try:
                move.direct(file, completed)
            finally:
                move.engine.drain()
        except OSError as error:
            if outcome:  # else the ring failed, and the kernel may still use the memory
                _raise_refusal("direct I/O", error)
            raise
        self._proved = True
        if self._writing and self._cached.resident_bytes(move.offset, size_bytes):
            why = "O_DIRECT is accepted, yet goes through the page cache"
            if self._policy.drop(IoPath.DIRECT):
                move.meter.fell_back(IoPath.DIRECT, "page cache", why)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
