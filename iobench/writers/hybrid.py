"""The `hybrid` writer: each operation takes the path that suits it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np

from iobench import linux
from iobench.units import GIB, KIB, MIB
from iobench.writers.availability import Availability
from iobench.writers.files import NewFile, try_directory
from iobench.writers.hybrid_file import HybridFile
from iobench.writers.hybrid_stream import HybridStream
from iobench.writers.image import FileImage
from iobench.writers.memory_pressure import MemoryPressure
from iobench.writers.options import WriterOptions, option
from iobench.writers.path_policy import Path, PathPolicy
from iobench.writers.posix import PosixWriter
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool, Blocks, run_workers

__all__ = ["HybridOptions", "HybridWriter"]

_PATHS = {
    "all": tuple(Path),
    "direct": (Path.DIRECT, Path.BUFFERED),
    "uncached": (Path.UNCACHED, Path.BUFFERED),
}

_IN_ORDER = (Path.UNCACHED, Path.DIRECT, Path.BUFFERED)
"""What one reader prefers: the page cache's read-ahead works while the last block is copied."""


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
    threads: int = option(
        4, low=1, high=256, search=(1, 2, 3, 4, 6, 8), help="workers, each with one block in flight"
    )
    read_threads: int = option(
        1,
        low=1,
        high=256,
        search=(1, 2, 4, 8),
        help="the same for a restore; one reads in order, which lets the kernel read ahead",
    )
    small_size: int = option(
        256 * KIB,
        unit="bytes",
        low=linux.PAGE,
        high=GIB,
        search=(64 * KIB, 256 * KIB, MIB),
        help="below this a file or a tail goes through the page cache",
    )
    paths: str = option(
        "all",
        choices=tuple(_PATHS),
        search=tuple(_PATHS),
        help="what large operations may take: direct, uncached, or all, the faster one",
    )
    read_soon: bool = option(
        False, help="the files will be read soon: keep them in memory, unless that is short"
    )
    fallocate: bool = option(
        True, search=(True, False), help="reserve the space of large files before writing"
    )


class HybridWriter(PosixWriter):
    """Small records through the page cache, large blocks past it, by the way that is faster now.

    `PathPolicy` decides for every operation, `HybridFile` carries it out, and a Transfer's
    `decisions` tell what was decided how often and why. A path that the file system refuses is
    given up with a recorded fallback, so this writer works everywhere.
    """

    name = "hybrid"
    summary = "chooses for each operation: page cache, RWF_DONTCACHE or O_DIRECT"
    Options = HybridOptions
    options: HybridOptions
    _reserves = False  # small files gain nothing by it, so it is done here for large ones

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._pool = BlockPool(self.options.block_size)
        self._pressure = MemoryPressure()
        self._small_size = min(self.options.small_size, self.options.block_size)

    def available(self, target: str | FilePath = ".") -> Availability:
        """Yes wherever files can be made; the reason tells which paths cannot be had there."""
        answer = try_directory(target)
        if not answer.ok:
            return answer
        meter, page = Meter(), np.zeros(linux.PAGE, dtype=np.uint8)
        try:
            with self._create(os.path.join(target, "probe"), meter) as file:
                for path in _PATHS[self.options.paths]:
                    policy = PathPolicy((path, Path.BUFFERED), small_size=1)
                    with self._file(file.fd, file.path, policy, writing=True) as hybrid:
                        image = FileImage.of("probe", [page])
                        hybrid.write(image, 0, linux.PAGE, meter, at=0, last=True)
        except OSError as error:
            reason = f"writing in {target} failed ({error.strerror or error})."
            return Availability(ok=False, reason=reason)
        lacks = [f"{one.reason}; {one.used} is used in its place." for one in meter.fallbacks]
        return Availability(ok=True, reason=" ".join(lacks))

    def _policy(self, *, reading: bool = False) -> PathPolicy:
        paths = _PATHS[self.options.paths]
        if reading and self.options.read_threads == 1:  # nothing else reads while it waits
            paths = tuple(sorted(paths, key=_IN_ORDER.index))
        return PathPolicy(
            paths,
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
            pool=self._pool,
            small_size=self._small_size,
        )

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        size = image.size_bytes
        if self.options.fallocate and size >= self._small_size:
            file.reserve(0, size)
        with self._file(file.fd, file.path, self._policy(), writing=True) as hybrid:

            def work(blocks: Blocks, own: Meter) -> None:
                for start, stop in blocks:
                    hybrid.write(image, start, stop, own, at=start, last=stop == size)

            self._run(0, size, self.options.threads, work, meter)

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        with self._file(fd, image.path, self._policy(reading=True), writing=False) as hybrid:

            def work(blocks: Blocks, own: Meter) -> None:
                for begin, end in blocks:
                    hybrid.read(image, begin, max(begin, start), end, own)

            self._run(start - start % linux.PAGE, stop, self.options.read_threads, work, meter)

    def _run(
        self,
        start: int,
        stop: int,
        threads: int,
        work: Callable[[Blocks, Meter], None],
        meter: Meter,
    ) -> None:
        size = self.options.block_size
        blocks = Blocks(start, stop, size)
        if stop - start <= size:
            work(blocks, meter)
            return
        run_workers(min(threads, -(-(stop - start) // size)), blocks, work, meter)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        if self.options.fallocate and size and size >= self._small_size:
            file.reserve(0, size)
        return HybridStream(
            file,
            self.name,
            meter,
            hybrid=self._file(file.fd, file.path, self._policy(), writing=True),
            pool=self._pool,
            threads=self.options.threads,
            reserve_ahead=self.options.fallocate and not size,
        )
