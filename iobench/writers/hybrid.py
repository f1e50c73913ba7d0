"""The `hybrid` writer: each operation takes the path that suits it.

`_send` writes a small file at once. It hands a large file to `_run`, which calls
`HybridFile.write` for each block: in one thread with a ring, or in several threads without one.
hybrid_paths/file.py draws the way of one block from there to the kernel and back.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from iobench import linux
from iobench.errors import UnavailableError
from iobench.units import GIB, KIB, MIB
from iobench.writers.availability import Availability, remedy_of
from iobench.writers.blocks.prefault import faulted_ahead
from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
from iobench.writers.direct.background import BackgroundWriter, most_blocks
from iobench.writers.direct.engine import BlockingEngine, DirectEngine
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.direct.uring_engine import RingEngine, most_pieces
from iobench.writers.direct.uring_queue import open_ring
from iobench.writers.hybrid_paths.file import HybridFile
from iobench.writers.hybrid_paths.memory_pressure import MemoryPressure
from iobench.writers.hybrid_paths.policy import IoOperation, IoPath, PathPolicy, Position
from iobench.writers.hybrid_paths.stream import HybridStream
from iobench.writers.image import Extent, FileImage
from iobench.writers.local.new_file import NewFile, ProbeFile, try_directory
from iobench.writers.local.posix import PosixWriter, pwrite_all
from iobench.writers.options import WriterOptions, option
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.typed import HybridValues

__all__ = ["HybridOptions", "HybridWriter"]

_PATHS = {
    "all": tuple(IoPath),
    "direct": (IoPath.DIRECT, IoPath.BUFFERED),
    "uncached": (IoPath.UNCACHED, IoPath.BUFFERED),
}

_MoveBlock = Callable[[int, int, DirectEngine], None]

_PIECE = 2 * MIB  # one operation on a ring; measured in docs/decisions/0036


@dataclass(frozen=True, kw_only=True)
class HybridOptions(WriterOptions):
    """Options of `hybrid`."""

    block_size: int = option(
        8 * MIB,
        unit="bytes",
        low=linux.PAGE,
        high=GIB,
        multiple_of=linux.PAGE,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB),
        help="bytes of one large operation",
    )
    iodepth: int = option(
        4,
        low=1,
        high=256,
        search=(1, 2, 3, 4, 6, 8),
        help="large operations in flight; without io_uring one thread for each",
    )
    uring: bool = option(
        True,
        search=(True, False),
        help="use io_uring, where available, for direct operations (in pieces of 2 MiB)",
    )
    small_size: int = option(
        256 * KIB,
        unit="bytes",
        low=linux.PAGE,
        high=GIB,
        search=(64 * KIB, 256 * KIB, MIB),
        help="a file or a tail below this size goes through the page cache",
    )
    paths: str = option(
        "all",
        choices=tuple(_PATHS),
        search=tuple(_PATHS),
        help="paths of large operations: direct, uncached, or all (direct where it works)",
    )
    read_soon: bool = option(
        False, help="the files will be read soon: keep them in memory unless it is short"
    )
    fallocate: bool = option(
        True, search=(True, False), help="reserve the space of large files before writing"
    )


class HybridWriter(PosixWriter):
    """Writes small records through the page cache, and large blocks past it where that works.

    `PathPolicy` chooses the path of every operation, and `HybridFile` carries the operation out.
    The `decisions` of a Transfer count operations by path and reason. When the file system refuses
    a path, the writer records a fallback and stops using that path, so it works everywhere.
    """

    name = "hybrid"
    summary = "chooses for each operation: page cache, RWF_DONTCACHE, or O_DIRECT with io_uring"
    Options = HybridOptions
    options: HybridOptions
    _reserves = False  # small files gain nothing from it; `_send` reserves space for large ones

    def __init__(
        self, options: HybridOptions | None = None, **values: Unpack[HybridValues]
    ) -> None:
        super().__init__(options, **values)
        self._pool = BlockPool(self.options.block_size, most_blocks(self.options.iodepth))
        self._pieces = BlockPool(self._piece_size, most_pieces(self._ring_depth))
        self._pressure = MemoryPressure()
        self._small_size = min(self.options.small_size, self.options.block_size)
        self._small_files = self._policy()

    @property
    def direct(self) -> bool:
        return IoPath.DIRECT in _PATHS[self.options.paths]

    def available(self, target: str | Path = ".") -> Availability:
        """Whether files can be made in `target`; the reason names the paths that do not work."""
        answer = try_directory(target)
        if not answer.ok:
            return answer
        meter, page = Meter(), np.zeros(linux.PAGE, dtype=np.uint8)
        try:
            with self._create(os.path.join(target, "probe"), meter, ProbeFile) as file:
                for path in _PATHS[self.options.paths]:
                    policy = PathPolicy((path, IoPath.BUFFERED), small_size=1)
                    with self._file(file.fd, file.path, policy, writing=True) as hybrid:
                        hybrid.write(Extent.of(page, 0), self._blocking(meter), last=True)
            self._admits_ring(meter)
        except OSError as error:
            reason = f"writing in {target} failed ({error.strerror or error})."
            return Availability(ok=False, reason=reason, remedy=remedy_of(error))
        missing = [f"{one.reason}; {one.used} is used in its place." for one in meter.fallbacks]
        return Availability(ok=True, reason=" ".join(missing))

    def _policy(self) -> PathPolicy:
        return PathPolicy(
            _PATHS[self.options.paths],
            small_size=self._small_size,
            read_soon=self.options.read_soon,
        )

    def _file(self, fd: int, path: str, policy: PathPolicy, *, writing: bool) -> HybridFile:
        return HybridFile(
            fd,
            path,
            writing=writing,
            policy=policy,
            pressure=self._pressure,
            block_size=self.options.block_size,
            small_size=self._small_size,
        )

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        size = image.size_bytes
        if 0 < size < self._small_size and self._send_small(file, image, meter):
            return
        if self.options.fallocate and size >= self._small_size:
            file.reserve(0, size)
        with self._file(file.fd, file.path, self._policy(), writing=True) as hybrid:

            def move(start: int, stop: int, engine: DirectEngine) -> None:
                hybrid.write(Extent(image, start, stop, start), engine, last=stop == size)

            self._run(hybrid, 0, size, move, meter, writes=True)

    def _send_small(self, file: NewFile, image: FileImage, meter: Meter) -> bool:
        """Write a small file through the page cache; False if the policy chooses another path.

        For a single write, the set-up of a HybridFile costs more than the write itself.
        """
        operation = IoOperation(size_bytes=image.size_bytes, position=Position.WHOLE)
        decision = self._small_files.choose(operation, self._pressure.now())
        if decision.path != IoPath.BUFFERED:
            return False
        with image.outgoing(0, image.size_bytes, meter) as views, meter.operation("write"):
            calls = pwrite_all(file.fd, views, 0)
        meter.count(decision.path, image.size_bytes, calls)
        meter.decided(decision.path, decision.reason)
        return True

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        first = start - start % linux.PAGE
        with self._file(fd, image.path, self._policy(), writing=False) as hybrid:
            held = hybrid.held(Blocks(first, stop, self.options.block_size))

            def move(begin: int, end: int, engine: DirectEngine) -> None:
                part = Extent(image, max(begin, start), end, begin)
                hybrid.read(part, engine, in_cache=begin in held)

            # Not for a read through the page cache, which needs the same free memory.
            prefault = hybrid.may_go_direct()
            with faulted_ahead(image, start, stop) if prefault else contextlib.nullcontext():
                self._run(hybrid, first, stop, move, meter, writes=False)

    def _run(
        self,
        hybrid: HybridFile,
        start: int,
        stop: int,
        move: _MoveBlock,
        meter: Meter,
        *,
        writes: bool,
    ) -> None:
        """Move every block: by a ring while direct I/O works, the rest by threads."""
        size = self.options.block_size
        if stop - start > size and hybrid.may_go_direct() and self._admits_ring(meter):
            start = self._run_in_ring(hybrid, start, stop, move, meter, writes=writes)

        def work(blocks: Blocks, own: Meter) -> None:
            engine = self._blocking(own)
            for begin, end in blocks:
                move(begin, end, engine)

        blocks = Blocks(start, stop, size)
        if stop - start <= size:
            work(blocks, meter)
            return
        # The kernel reads ahead in the page cache only for a reader that goes in order.
        threads = self.options.iodepth if writes or hybrid.may_go_direct() else 1
        run_workers(threads, blocks, work, meter)

    def _run_in_ring(
        self,
        hybrid: HybridFile,
        start: int,
        stop: int,
        move: _MoveBlock,
        meter: Meter,
        *,
        writes: bool,
    ) -> int:
        """Move blocks until direct I/O is given up; return where the remaining blocks begin."""
        position = start

        def work(blocks: Blocks, own: Meter) -> None:
            nonlocal position
            with self._engine(own, writes=writes) as engine:
                for begin, end in blocks:
                    move(begin, end, engine)
                    position = end
                    if not hybrid.may_go_direct():
                        break
                engine.drain()

        blocks = Blocks(start, stop, self.options.block_size)
        run_workers(1, blocks, work, meter, caller_waits=True)
        return position

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        if self.options.fallocate and size and size >= self._small_size:
            file.reserve(0, size)
        hybrid = self._file(file.fd, file.path, self._policy(), writing=True)
        ring = self._admits_ring(meter)

        def write(engine: DirectEngine, block: Extent, on_complete: OnComplete) -> None:
            hybrid.write(block, engine, last=False, on_complete=on_complete)

        return HybridStream(
            file,
            self.name,
            meter,
            hybrid=hybrid,
            engine=self._blocking(meter),
            background=BackgroundWriter(
                self._pool,
                self.options.iodepth,
                functools.partial(self._engine, writes=True) if ring else self._blocking,
                write,
                ring=ring,
            ),
            reserve_ahead=self.options.fallocate and not size,
        )

    def _blocking(self, meter: Meter) -> DirectEngine:
        return BlockingEngine(self._pool, meter, path=IoPath.DIRECT)

    def _engine(self, meter: Meter, *, writes: bool) -> DirectEngine:
        """Return a ring engine for the calling thread, or a blocking one if no ring is available.

        The second case is recorded as a fallback.
        """
        # A restore has a quarter of the blocks in flight: few blocks stay in the processor's cache
        # until they are copied, many hide a longer latency. Choosing the number by measurement at
        # run time was no faster (docs/decisions/0036).
        iodepth = self._ring_depth if writes else max(1, self._ring_depth // 4)
        try:
            with meter.phase("open"):
                ring = open_ring(iodepth)
        except UnavailableError as error:
            meter.fell_back("io_uring", "one write or read at a time", error.reason)
            return self._blocking(meter)
        return RingEngine(
            ring, iodepth, self._pieces, meter, writes=writes, path=f"io_uring {IoPath.DIRECT}"
        )

    @property
    def _piece_size(self) -> int:
        return min(_PIECE, self.options.block_size)

    @property
    def _ring_depth(self) -> int:
        return self.options.iodepth * -(-self.options.block_size // self._piece_size)

    def _admits_ring(self, meter: Meter) -> bool:
        """Whether rings are wanted and available; a refused ring is recorded as a fallback."""
        if not self.options.uring or not self.direct:
            return False
        if self._ring_refusal:
            meter.fell_back("io_uring", "threads", self._ring_refusal)
        return not self._ring_refusal

    @functools.cached_property
    def _ring_refusal(self) -> str:
        """Set up a ring as a test; return why that fails, or an empty text."""
        try:
            open_ring(self._ring_depth).close()
        except UnavailableError as error:
            return error.reason.rstrip(".")
        return ""
