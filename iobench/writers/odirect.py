"""The `odirect` writer: past the page cache, staged through aligned blocks by a few workers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iobench import linux
from iobench.errors import TransferError, UnavailableError
from iobench.units import GIB, KIB, MIB
from iobench.writers.availability import Availability
from iobench.writers.direct_io import pread_direct, pwrite_direct
from iobench.writers.direct_stream import DirectStream
from iobench.writers.files import NewFile, try_directory
from iobench.writers.image import Bytes, FileImage
from iobench.writers.options import WriterOptions, option
from iobench.writers.posix import PosixWriter
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool, Blocks, run_workers

__all__ = ["ODirectOptions", "ODirectWriter"]

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
_REMEDY = "Use --writer uncached or buffered, or a target on a file system with direct I/O."
_UNKNOWN = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
"""Assumed where statx does not tell: what every file system with direct I/O takes."""


@dataclass(frozen=True, kw_only=True)
class ODirectOptions(WriterOptions):
    """Options of `odirect`."""

    block_size: int = option(
        8 * MIB,
        unit="bytes",
        low=4 * KIB,
        high=GIB,
        multiple_of=4 * KIB,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        help="bytes of one direct write or read",
    )
    threads: int = option(
        4, low=1, high=256, search=(1, 2, 3, 4, 6, 8), help="workers, each with one block in flight"
    )
    fallocate: bool = option(True, search=(True, False), help="reserve the space before writing")


class ODirectWriter(PosixWriter):
    """Each worker takes the next block of the image, gathers it and writes it, O_DIRECT.

    With two workers or more the copy of one block runs beside the write of another. A block whose
    memory already lies as the device wants it is written without a copy. The tail is padded,
    written and cut off again.
    """

    name = "odirect"
    summary = "past the page cache (O_DIRECT), staged in aligned blocks by several threads"
    Options = ODirectOptions
    options: ODirectOptions
    _flags = os.O_DIRECT

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._pool = BlockPool(self.options.block_size)

    @property
    def _reserves(self) -> bool:
        return self.options.fallocate

    def available(self, target: str | Path = ".") -> Availability:
        answer = try_directory(target)
        if not answer.ok:
            return answer
        try:
            with self._create(os.path.join(target, "probe"), Meter()) as file:
                alignment = self._alignment(file.fd)
                with self._pool.block() as block:
                    os.pwrite(file.fd, block[: alignment.offset].data, 0)
        except UnavailableError as error:
            return Availability(ok=False, reason=error.reason, remedy=error.remedy)
        except OSError as error:
            reason = f"a direct write in {target} failed ({error.strerror or error})."
            return Availability(ok=False, reason=reason, remedy=_REMEDY)
        return Availability(ok=True)

    def _create(self, path: str | Path, meter: Meter) -> NewFile:
        try:
            return super()._create(path, meter)
        except OSError as error:
            raise self._refused(error, os.path.dirname(path)) from error

    def _open_source(self, path: str, size_bytes: int) -> int:
        try:
            return super()._open_source(path, size_bytes)
        except OSError as error:
            raise self._refused(error, os.path.dirname(path)) from error

    def _refused(self, error: OSError, where: str) -> Exception:
        if error.errno not in _REFUSED or isinstance(error, TransferError):
            return error
        return UnavailableError(
            self.name, f"the file system of {where or '.'} refuses O_DIRECT.", _REMEDY
        )

    def _alignment(self, fd: int) -> linux.DioAlignment:
        alignment = linux.dio_alignment(fd) or _UNKNOWN
        if not alignment.offset or not alignment.memory:
            raise UnavailableError(self.name, "this file admits no direct I/O (statx).", _REMEDY)
        if self.options.block_size % alignment.offset or alignment.memory > linux.PAGE:
            raise UnavailableError(
                self.name,
                f"direct I/O wants multiples of {alignment.offset} bytes here, "
                f"block_size is {self.options.block_size}.",
                f"Set block_size to a multiple of {alignment.offset}.",
            )
        return alignment

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        alignment = self._alignment(file.fd)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._pool.block() as staging:
                for start, stop in blocks:
                    data = _as_it_lies(image, start, stop, alignment)
                    if data is None:
                        with own.phase("gather"):
                            image.gather(start, stop, staging)
                        data = staging[: _round_up(stop - start, alignment.offset)]
                    with own.phase("write"):
                        calls = pwrite_direct(file.fd, data, start, alignment.offset)
                    own.count("direct", len(data), calls)

        self._run(0, image.size_bytes, work, meter)

    def _receive(self, fd: int, image: FileImage, start: int, stop: int, meter: Meter) -> None:
        alignment = self._alignment(fd)

        def work(blocks: Blocks, own: Meter) -> None:
            with self._pool.block() as staging:
                for begin, end in blocks:
                    wanted = max(begin, start)
                    data = _as_it_lies(image, wanted, end, alignment) if wanted == begin else None
                    block = staging[: _round_up(end - begin, alignment.offset)]
                    target = block if data is None else data
                    with own.phase("read"):
                        calls = pread_direct(fd, target, begin, end - begin, alignment.offset)
                    own.count("direct", end - begin, calls)
                    if data is None:
                        with own.phase("scatter"):
                            image.scatter(wanted, end, block[wanted - begin :])

        self._run(start - start % alignment.offset, stop, work, meter)

    def _run(
        self, start: int, stop: int, work: Callable[[Blocks, Meter], None], meter: Meter
    ) -> None:
        size = self.options.block_size
        threads = max(1, min(self.options.threads, -(-(stop - start) // size)))
        run_workers(threads, Blocks(start, stop, size), work, meter)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> Stream:
        return DirectStream(
            file,
            self.name,
            meter,
            pool=self._pool,
            threads=self.options.threads,
            alignment=self._alignment(file.fd).offset,
            reserve_ahead=self.options.fallocate and not size,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _as_it_lies(
    image: FileImage, start: int, stop: int, alignment: linux.DioAlignment
) -> Bytes | None:
    """The bytes [start, stop) as one view that direct I/O takes as it is, or None."""
    if (stop - start) % alignment.offset or start % alignment.offset:
        return None
    views = image.views(start, stop)
    if len(views) != 1 or views[0].ctypes.data % alignment.memory:
        return None
    return views[0]
