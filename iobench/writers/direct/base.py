"""DirectWriter: the base of the writers that bypass the page cache."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from iobench import linux
from iobench.errors import TransferError, UnavailableError
from iobench.writers.availability import Availability, remedy_of
from iobench.writers.blocks.prefault import faulted_ahead
from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
from iobench.writers.direct.background import BackgroundWriter, most_blocks
from iobench.writers.direct.engine import DirectEngine
from iobench.writers.direct.stream import DirectStream
from iobench.writers.image import AnyMemory, Extent, FileImage
from iobench.writers.local.direct_file import (
    NO_DIRECT_REMEDY,
    REFUSED,
    DirectFile,
    direct_alignment,
)
from iobench.writers.local.new_file import NewFile, ProbeFile, try_directory
from iobench.writers.local.posix import PosixWriter
from iobench.writers.options import WriterOptions
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

__all__ = ["DirectWriter"]

_NONE = linux.DioAlignment(memory=1, offset=1)


class DirectWriter(PosixWriter):
    """A writer of aligned blocks, with O_DIRECT unless a subclass clears `_flags`.

    Its options have `block_size`; `_pool` holds staging blocks of that size. Workers share the
    blocks of a file, and each moves its blocks by a DirectEngine.
    """

    _flags = os.O_DIRECT
    _caller_waits = False
    """Whether the calling thread must not be one of the workers."""

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._block_size: int = self.options.to_dict()["block_size"]
        self._pool = BlockPool(self._block_size, self._most_blocks)

    @property
    def direct(self) -> bool:
        return bool(self._flags & os.O_DIRECT)

    @property
    @abstractmethod
    def _workers(self) -> int:
        """The most workers that share a file."""

    @property
    def _stream_depth(self) -> int:
        """The most blocks of a stream in flight."""
        return self._workers

    @property
    def _most_blocks(self) -> int:
        """The staging blocks that one operation needs."""
        return most_blocks(self._stream_depth)

    @abstractmethod
    def _engine(self, meter: Meter, *, writes: bool) -> DirectEngine:
        """Make the engine of one worker. Called in the thread of that worker."""

    def available(self, target: str | Path = ".") -> Availability:
        answer = try_directory(target)
        if not answer.ok:
            return answer
        meter = Meter()
        try:
            with self._create(os.path.join(target, "probe"), meter, ProbeFile) as file:
                smallest = self._probe_memory(self._alignment(file.fd).offset)
                image = FileImage.of("probe", [smallest])
                with self._reachable(image, meter) as reachable:
                    self._send(file, reachable, meter)
        except UnavailableError as error:
            return Availability(ok=False, reason=error.reason, remedy=error.remedy)
        except OSError as error:
            how = "direct write" if self.direct else "write"
            reason = f"a {how} in {target} failed ({error.strerror or error})."
            remedy = remedy_of(error) or NO_DIRECT_REMEDY
            return Availability(ok=False, reason=reason, remedy=remedy)
        return Availability(ok=True, reason=self._restriction(meter))

    def _probe_memory(self, size_bytes: int) -> AnyMemory:
        """Return the memory of the trial write of `available`."""
        return np.zeros(size_bytes, dtype=np.uint8)

    def _restriction(self, meter: Meter) -> str:  # noqa: ARG002
        """Return what a trial write that succeeded says about this target."""
        return ""

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        direct = DirectFile(fd=file.fd, alignment=self._alignment(file.fd))

        def work(blocks: Blocks, own: Meter) -> None:
            with self._engine(own, writes=True) as engine:
                for start, stop in blocks:
                    engine.write(direct, Extent(image, start, stop, start))
                engine.drain()

        self._run(0, image.size_bytes, work, meter)

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        direct = DirectFile(fd=fd, alignment=self._alignment(fd))

        def work(blocks: Blocks, own: Meter) -> None:
            with self._engine(own, writes=False) as engine:
                for begin, end in blocks:
                    part = Extent(image, max(begin, start), end, begin)
                    engine.read(direct, part, part.filled)
                engine.drain()

        # Not for a read through the page cache, which needs the same free memory.
        with faulted_ahead(image, start, stop) if self.direct else contextlib.nullcontext():
            self._run(start - start % direct.alignment.offset, stop, work, meter)

    def _run(
        self, start: int, stop: int, work: Callable[[Blocks, Meter], None], meter: Meter
    ) -> None:
        blocks = Blocks(start, stop, self._block_size)
        run_workers(self._workers, blocks, work, meter, caller_waits=self._caller_waits)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        direct = DirectFile(fd=file.fd, alignment=self._alignment(file.fd))
        background = BackgroundWriter(
            self._pool,
            self._stream_depth,
            lambda own: self._engine(own, writes=True),
            lambda engine, block, done: engine.write(direct, block, done),
            ring=self._caller_waits,
        )
        return DirectStream(
            file,
            self.name,
            meter,
            background=background,
            alignment=direct.alignment.offset,
            reserve_ahead=self._reserves and not size,
        )

    def _create(self, path: str | Path, meter: Meter, kind: type[NewFile] = NewFile) -> NewFile:
        try:
            return super()._create(path, meter, kind)
        except OSError as error:
            raise self._refused(error, os.path.dirname(path)) from error

    def _open_source(self, path: str, size_bytes: int) -> int:
        try:
            return super()._open_source(path, size_bytes)
        except OSError as error:
            raise self._refused(error, os.path.dirname(path)) from error

    def _refused(self, error: OSError, where: str) -> Exception:
        if not self.direct or error.errno not in REFUSED or isinstance(error, TransferError):
            return error
        return UnavailableError(
            self.name, f"the file system of {where or '.'} refuses O_DIRECT.", NO_DIRECT_REMEDY
        )

    def _alignment(self, fd: int) -> linux.DioAlignment:
        """Return the alignment that the open file needs of addresses, offsets and lengths."""
        if not self.direct:
            return _NONE
        return direct_alignment(self.name, fd, self._block_size)
