"""HybridFile: one open file with a way through the page cache and a way past it.

A write, whole pages first and then the rest of the last page, goes

    PathPolicy.choose ─┬─ buffered, uncached ─> CachedFile ──────────────────────> kernel
                       └─ direct ─> DirectEngine ─ in pieces ─> InFlight ─> Ring ─> kernel

and a direct piece comes back, when its thread writes the next range or waits:

    Ring ─> InFlight ─> RingEngine: gives the block back ─> latch of the range, when it was the
    last piece ─> HybridFile: learns the rate ─> latch of the write ─> `on_complete`

A refused direct write goes through the page cache, and so does all that follows it.
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
    """Direct I/O is refused; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """An operation at `offset`, how each path carries it out, and the latch of its call."""

    operation: IoOperation
    offset: int
    direct: Callable[[DirectFile, OnComplete], None]
    cached: Callable[[IoPath], None]
    meter: Meter
    engine: DirectEngine
    latch: CompletionLatch


class HybridFile:
    """Moves ranges of a file, each by the path that the policy gives it. Thread-safe.

    Ranges that are moved at the same time must not share a page. Then no page is ever touched by a
    cached and a direct operation at once: ranges are cut at page boundaries, and a direct
    write over pages that were written through the cache before waits until they are on storage and
    drops them first.

    `fd` is the way through the page cache and stays the caller's; it is opened once more for the
    way past it, when the first operation wants that. What goes past it is carried by the engine of
    the calling thread, at once or later. Where direct I/O is refused it is given up for the whole
    file and recorded as a fallback; until one direct operation has succeeded each is awaited, so
    that a refusal is known before anything follows it.
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
        self._again = f"/proc/self/fd/{fd}"  # the same file, whatever happens to its name
        self._writing = writing
        self._policy, self._pressure = policy, pressure
        self._block_size, self._small_size = block_size, small_size
        self._lock = threading.RLock()
        self._direct: DirectFile | None = None
        self._alignment = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
        self._proved = False
        """Whether a direct operation has succeeded."""

    def may_go_direct(self) -> bool:
        """Whether the way past the page cache by O_DIRECT has not been given up."""
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
        """Write bytes [start, stop) of `image` at offset `at` of the file, a multiple of pages.

        `last` says that the file ends there for now. `on_complete` is called once, when all is
        written or has failed: on return, when this raises, or when `engine` waits. See OnComplete.
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
        """The operations of one write: all of it, or whole pages and the rest of the last page."""
        position = Position.MIDDLE if at else Position.FIRST
        if last:
            position = Position.TAIL if at else Position.WHOLE
        # O_DIRECT takes whole sectors: the rest would have to be padded, and cut off again.
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
        """Fill bytes [wanted, stop) of `image`; `begin`, a multiple of pages, is not above.

        All is there on return, or when `engine` has been drained.
        """
        data = aligned_view(image, wanted, stop, self._alignment) if wanted == begin else None
        whole = begin == 0 and stop == image.size_bytes
        operation = IoOperation(
            size_bytes=stop - wanted,
            position=Position.WHOLE if whole else Position.FIRST if not begin else Position.MIDDLE,
            aligned=begin % self._alignment.offset == 0,  # a block is rounded up, and cut
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
        """Move by the path that the policy chooses; where direct I/O is refused, by another."""
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
            move.engine.drain()  # what is in flight must not count as this path's time
        began = time.perf_counter()
        move.cached(path)
        self._policy.learn(path, move.operation.size_bytes, time.perf_counter() - began)

    def _go_direct(self, move: _Move) -> None:
        file, size_bytes = self._open_direct(), move.operation.size_bytes
        if self._writing:
            if not self._is_aligned(move.offset, size_bytes):  # known since the file was opened
                raise _RefusedError(f"direct I/O wants multiples of {file.alignment.offset} bytes")
            # The kernel drops cached pages below a direct write only where it can (open(2), NOTES).
            self._cached.leave(move.offset, move.offset + size_bytes)
        # Little's law: what shares the device with others takes its share of the time.
        share = size_bytes / (size_bytes + move.engine.bytes_in_flight)
        began, awaited, outcome = time.perf_counter(), not self._proved, list[bool]()

        def completed(ok: bool) -> None:
            outcome.append(ok)
            if ok:
                seconds = (time.perf_counter() - began) * share
                self._policy.learn(IoPath.DIRECT, size_bytes, seconds)
            move.latch.end(ok or awaited)  # what is awaited raises, or is done again

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
            fd = os.open(self._again, flags | os.O_DIRECT | os.O_CLOEXEC)
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
        """Close the way past the page cache, if it was opened."""
        with self._lock:
            file, self._direct = self._direct, None
        if file is not None:
            os.close(file.fd)


def _raise_refusal(doing: str, error: OSError) -> None:
    """Raise _RefusedError if the kernel says by `error` that it has no direct I/O."""
    if error.errno in REFUSED and not isinstance(error, IobenchError):
        raise _RefusedError(f"{doing} is refused ({error.strerror})") from error
