"""FileWriter: writes and reads files by one path or several, with threads or an io_uring.

`buffered`, `uncached`, `odirect`, `uring` and `hybrid` are presets of it: each has its options and
makes a `FileSetting` of them. The frames of `HybridWriter.write` in the thread of a ring, for each
piece of 2 MiB:

    1 work                  FileWriter._move: takes the next block of 8 MiB
    2 PathFile.write        chooses the path of the block, cuts off its tail
    3 RingEngine.write      cuts off a piece; gathers it, unless its memory is aligned
    4 RingEngine.start      waits until fewer than `iodepth` are in flight
    5 RingEngine._submit    begins an operation, or the rest of one
    6 PyuringRing.write     names the call of pyuring
    7 PyuringRing._start    calls it unless the ring has failed; it enters the kernel
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from iobench import linux
from iobench.errors import UnavailableError, transfer_errors
from iobench.writers.base import Availability
from iobench.writers.blocks.workers import BlockPool, Blocks, faulted_ahead, run_workers
from iobench.writers.direct.background import BackgroundSink
from iobench.writers.direct.engine import BlockingEngine, DirectEngine, RingEngine
from iobench.writers.direct.file import FileSetting as FileSetting
from iobench.writers.direct.file import IoPath, PathFile, PathSupport
from iobench.writers.direct.ring import PyuringRing
from iobench.writers.image import AnyMemory, Bytes, Extent, FileImage, FileRanges, Ranges
from iobench.writers.local.direct_file import NO_DIRECT_REMEDY, round_up
from iobench.writers.local.new_file import NewFile, reserve_blocks, try_directory
from iobench.writers.local.posix import TOGETHER, OpenRead, PosixWriter
from iobench.writers.options import WriterOptions
from iobench.writers.stream import BlockStream, PlainSink
from iobench.writers.transfer import Meter, Transfer


def _whole(image: FileImage) -> FileRanges:
    return image, [(0, image.size_bytes)]


_FULL = "Make room there, or name another directory."


class _OpenFile(NamedTuple):
    """Ranges of an image that move to or from an open file."""

    file: PathFile
    image: FileImage
    ranges: Ranges


class FileWriter(PosixWriter):
    """Moves the blocks of a file by the paths of its `FileSetting`.

    Workers share the blocks of a file, or of several files in `write_many` and `read_many`: the
    first blocks of a file begin while the last ones of the file before are in flight. The calling
    thread of a ring only waits: Ctrl-C in it ends the transfer once the kernel uses none of the
    memory any more.
    """

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._how = how = self._setting()
        pieces = how.rings * (how.iodepth + 1)
        shared = how.piece_size == how.block_size
        most = how.stream_depth + 2  # of a stream, one block waits and one is filled
        self._pool = BlockPool(how.block_size, max(most, pieces) if shared else most)
        self._pieces = self._pool if shared else BlockPool(how.piece_size or 1, pieces)
        self._support = PathSupport(self.name, how.dontcache)

    @abstractmethod
    def _setting(self) -> FileSetting:
        """Return the setting that the options mean."""

    @property
    def direct(self) -> bool:
        return IoPath.DIRECT in self._how.paths and self._how.o_direct

    def available(self, target: str | Path = ".") -> Availability:
        """Whether files can be written in `target`; the reason names what does not work there."""
        answer = try_directory(target)
        if not answer.ok or self._how.only is IoPath.BUFFERED:
            return answer
        meter = Meter()
        try:
            # It has no name, so that a killed process leaves nothing.
            with tempfile.TemporaryFile(dir=target) as file:
                self._try(file.fileno(), os.path.join(target, "probe"), meter)
        except UnavailableError as error:
            return Availability(ok=False, reason=error.reason, remedy=error.remedy)
        except OSError as error:
            only, full = self.direct and self._how.only, error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = f"a {'direct ' if only else ''}write in {target} failed "
            return Availability(
                ok=False,
                reason=f"{reason}({error.strerror or error}).",
                remedy=_FULL if full else NO_DIRECT_REMEDY if only else "",
            )
        return Availability(ok=True, reason=self._restriction(meter))

    def _try(self, fd: int, path: str, meter: Meter) -> None:
        """Write as little as possible by the path of large operations."""
        with self._file(fd, path, writing=True) as probed:
            least = probed.unit if self._how.only else round_up(self._how.small_size, linux.PAGE)
        image = FileImage.of("probe", [self._probe_memory(least)])
        with self._reachable(image, meter) as reachable:
            self._send_ranges(fd, path, reachable, [(0, least)], meter)
        self._admits_ring(meter)

    def _probe_memory(self, size_bytes: int) -> AnyMemory:
        """Return the memory of the trial write of `available`."""
        return np.zeros(size_bytes, dtype=np.uint8)

    def _restriction(self, meter: Meter) -> str:
        """Return what a trial write that succeeded says about this target."""
        return " ".join(
            f"{one.reason}; {one.used} is used in its place." for one in meter.fallbacks
        )

    # Writes and reads of one file.

    def _file(self, fd: int, path: str, *, writing: bool) -> PathFile:
        return PathFile(fd, path, self._how, self._support, writing=writing)

    def write_ranges(self, fd: int, image: FileImage, ranges: Ranges, path: str) -> None:
        """Write `ranges` of `image` to the open file `fd`, at the same offsets; it is not synced.

        So a file that is there in part is continued. Ranges begin at multiples of the page, and all
        but the last end at one. Space for the whole file is reserved first. The file may be
        longer afterwards; its size is to be set. `path` is its name for messages. Raises OSError,
        UnavailableError.
        """
        meter = Meter()
        if self._reserves:
            reserve_blocks(fd, 0, image.size_bytes)
        self._send_ranges(fd, path, image, ranges, meter)

    def _reserve(self, file: NewFile, size_bytes: int) -> None:
        if size_bytes >= self._how.small_size:  # small files gain nothing from it
            super()._reserve(file, size_bytes)

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        self._send_ranges(file.fd, file.path, image, [(0, image.size_bytes)], meter)

    def _send_ranges(
        self, fd: int, path: str, image: FileImage, ranges: Ranges, meter: Meter
    ) -> None:
        with self._file(fd, path, writing=True) as opened:
            threads = self._threads(image)
            if self._how.only is IoPath.UNCACHED and not self._support.dontcache(fd, meter):
                threads = 1
            self._move([_OpenFile(opened, image, ranges)], meter, writes=True, threads=threads)
            if self._how.cached:
                with meter.phase("write"):
                    opened.finish()

    def _threads(self, image: FileImage) -> int:
        """Return the most workers. Of two, one copies device memory while the other moves it."""
        return max(self._how.threads, 2 if self._how.cached and image.on_device else 1)

    def _receive(self, fd: int, image: FileImage, ranges: Ranges, meter: Meter) -> None:
        self._receive_files([OpenRead(fd, image.path, image, ranges)], meter)

    def _receive_files(self, reads: Sequence[OpenRead], meter: Meter) -> None:
        threads = self._threads(reads[0].image)  # of several, none is on a device
        if self._how.only is None and IoPath.DIRECT not in self._how.paths:
            threads = 1  # the kernel reads ahead only for a reader that goes in order
        files: list[_OpenFile] = []
        try:
            for fd, path, image, ranges in reads:
                with transfer_errors("reading", path):
                    file = self._file(fd, path, writing=False)
                files.append(_OpenFile(file, image, ranges))
            # Through the page cache, the read needs the same free memory.
            ahead = [(one.image, one.ranges) for one in reads] if self.direct else []
            with faulted_ahead(ahead):
                self._move(files, meter, writes=False, threads=threads)
        finally:
            for one in files:
                one.file.close()

    def _move(
        self, files: Sequence[_OpenFile], meter: Meter, *, writes: bool, threads: int
    ) -> None:
        """Move every block of `files`: by rings while direct I/O works, the rest by threads.

        The blocks are those of one range of bytes, in which each file begins at a multiple of the
        block. So a ring never runs empty between two files.
        """
        how = self._how
        unit = linux.PAGE if how.only is None else files[0].file.unit
        sizes = (one.image.size_bytes for one in files)
        bases = list(accumulate((round_up(size, how.block_size) for size in sizes), initial=0))
        based = list(zip(bases, files, strict=False))
        blocks = Blocks(
            ((base + start, base + stop) for base, one in based for start, stop in one.ranges),
            how.block_size,
            unit,
        )
        left = blocks.count
        held = (
            set()
            if writes
            else {
                base + begin
                for base, one in based
                for begin in one.file.held(Blocks(one.ranges, how.block_size, unit))
            }
        )
        alone = how.only is None and left <= 1  # no ring pays for itself
        may_go_direct = all(one.file.may_go_direct() for one in files)
        ring = not alone and may_go_direct and self._admits_ring(meter)

        def work(blocks: Blocks, own: Meter) -> None:
            nonlocal left
            with self._engine(own) if ring else self._blocking(own) as engine:
                for begin, end in blocks:
                    base, (file, image, _) = based[bisect.bisect_right(bases, begin) - 1]
                    start, stop = begin - base, end - base
                    part = Extent(image, start, stop, start - start % unit)
                    with transfer_errors("writing" if writes else "reading", file.name):
                        if writes:
                            file.write(part, engine)
                        else:
                            file.read(part, engine, in_cache=begin in held)
                    left -= 1
                    if ring and not file.may_go_direct():
                        break  # it is given up by the first block, if at all, and with one ring
                engine.drain()

        if ring:
            run_workers(how.rings, blocks, work, meter, caller_waits=True)
            if how.only or not left:
                return
            ring = False
        if alone:
            work(blocks, meter)
        else:
            run_workers(threads, blocks, work, meter)

    # Several files.

    def _shares_blocks(self, files: Sequence[FileRanges]) -> bool:
        """Whether to move `files` together: at least two are large, and all in host memory."""
        block = self._how.block_size
        large = sum(
            image.size_bytes > block and sum(stop - start for start, stop in ranges) > block
            for image, ranges in files
        )
        on_device = any(image.on_device for image, _ in files)
        return large > 1 and IoPath.DIRECT in self._how.paths and not on_device

    def _write_batch(
        self,
        images: Sequence[FileImage],
        target: str | Path,
        unpublished: list[NewFile],
        meter: Meter,
    ) -> None:
        """Write large files as one range of bytes.

        24 files of 12 MiB take 0.6 of the time that they take one after the other.
        """
        if not self._shares_blocks([_whole(image) for image in images]):
            super()._write_batch(images, target, unpublished, meter)
            return
        with contextlib.ExitStack() as opened:
            files = []
            for image in images:
                path = os.path.join(target, image.path)
                with transfer_errors("writing", path):
                    file = NewFile(path, meter)
                    unpublished.append(file)
                    self._reserve(file, image.size_bytes)
                    to = opened.enter_context(self._file(file.fd, file.path, writing=True))
                files.append(_OpenFile(to, image, [(0, image.size_bytes)]))
            self._move(files, meter, writes=True, threads=self._how.threads)
        for file, image in zip(unpublished, images, strict=True):
            file.set_size(image.size_bytes)

    def read_many(self, images: Iterable[FileImage | FileRanges], target: str | Path) -> Transfer:
        images, one_by_one = iter(images), super().read_many

        def parts() -> Iterator[Transfer]:  # none is kept
            yield Meter().transfer(self.name, "read", 0, durable=True, files=0)
            while batch := list(islice(images, TOGETHER)):
                files = [one if isinstance(one, tuple) else _whole(one) for one in batch]
                if self._shares_blocks(files):
                    meter = Meter()
                    size = self._read_files(files, target, meter)
                    yield meter.transfer(self.name, "read", size, durable=True, files=len(files))
                else:
                    yield one_by_one(batch, target)

        return Transfer.total(parts())

    # Streams.

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> BlockStream:
        how, opened = self._how, self._file(file.fd, file.path, writing=True)
        if how.cached:
            blocking = self._blocking(meter)

            def write(views: list[Bytes], offset: int) -> None:
                opened.write(Extent.of(views[0], offset), blocking)

            sink = PlainSink(write, how.block_size, opened.finish)
            return BlockStream(file, self.name, meter, sink)
        ring = self._admits_ring(meter)
        background = BackgroundSink(
            opened,
            self._pool,
            how.stream_depth,
            self._engine if ring else self._blocking,
            meter,
            ring=ring,
            reserve=file if self._reserves and not size else None,
        )
        return BlockStream(file, self.name, meter, background)

    # Engines.

    def _blocking(self, meter: Meter) -> DirectEngine:
        return BlockingEngine(self._pool, meter, path=IoPath.DIRECT)

    def _engine(self, meter: Meter) -> DirectEngine:
        """Return a ring engine for the calling thread.

        With several paths, an unavailable ring is a fallback: the engine is a blocking one then.
        """
        iodepth = self._how.iodepth
        try:
            with meter.phase("open"):
                ring = PyuringRing(iodepth)
        except UnavailableError as error:
            if self._how.only:
                raise
            meter.fell_back("io_uring", "one write or read at a time", error.reason)
            return self._blocking(meter)
        path = "io_uring direct" if self._how.o_direct else "io_uring buffered"
        return RingEngine(ring, iodepth, self._pieces, meter, path=path)

    def _admits_ring(self, meter: Meter) -> bool:
        """Whether rings are wanted and available; a refused ring is recorded as a fallback.

        With one path there is no other engine: it raises when it opens its ring.
        """
        if not self._how.rings or self._how.only:
            return bool(self._how.rings)
        if self._ring_refusal:
            meter.fell_back("io_uring", "threads", self._ring_refusal)
        return not self._ring_refusal

    @functools.cached_property
    def _ring_refusal(self) -> str:
        """Set up a ring as a test; return why that fails, or an empty text."""
        try:
            PyuringRing(self._how.iodepth).close()
        except UnavailableError as error:
            return error.reason.rstrip(".")
        return ""
