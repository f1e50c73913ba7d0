"""DirectWriter: what the writers past the page cache share: alignment, refusals, the probe."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from iobench import linux
from iobench.errors import TransferError, UnavailableError
from iobench.writers.availability import Availability
from iobench.writers.files import NewFile, try_directory
from iobench.writers.image import Bytes, FileImage
from iobench.writers.options import WriterOptions
from iobench.writers.posix import PosixWriter
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["REFUSED", "DirectWriter", "as_it_lies", "direct_alignment", "round_up"]

REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
_REMEDY = "Use --writer uncached or buffered, or a target on a file system with direct I/O."
_UNKNOWN = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
"""Assumed where statx does not tell: what every file system with direct I/O takes."""
_NONE = linux.DioAlignment(memory=1, offset=1)


class DirectWriter(PosixWriter):
    """A writer of aligned blocks, O_DIRECT unless a subclass clears `_flags`.

    Its options have `block_size`; `_pool` holds staging blocks of that size.
    """

    _flags = os.O_DIRECT

    def __init__(self, options: WriterOptions | None = None, **values: object) -> None:
        super().__init__(options, **values)
        self._block_size: int = self.options.to_dict()["block_size"]
        self._pool = BlockPool(self._block_size)

    def available(self, target: str | Path = ".") -> Availability:
        answer = try_directory(target)
        if not answer.ok:
            return answer
        try:
            with self._create(os.path.join(target, "probe"), Meter()) as file:
                smallest = np.zeros(self._alignment(file.fd).offset, dtype=np.uint8)
                self._send(file, FileImage.of("probe", [smallest]), Meter())
        except UnavailableError as error:
            return Availability(ok=False, reason=error.reason, remedy=error.remedy)
        except OSError as error:
            how = "direct write" if self._flags & os.O_DIRECT else "write"
            reason = f"a {how} in {target} failed ({error.strerror or error})."
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
        direct = self._flags & os.O_DIRECT
        if not direct or error.errno not in REFUSED or isinstance(error, TransferError):
            return error
        return UnavailableError(
            self.name, f"the file system of {where or '.'} refuses O_DIRECT.", _REMEDY
        )

    def _alignment(self, fd: int) -> linux.DioAlignment:
        """What the open file asks of addresses, and of offsets and lengths."""
        if not self._flags & os.O_DIRECT:
            return _NONE
        return direct_alignment(self.name, fd, self._block_size)


def direct_alignment(name: str, fd: int, block_size: int) -> linux.DioAlignment:
    """What O_DIRECT asks of the open file. Raises UnavailableError if that cannot be met."""
    alignment = linux.dio_alignment(fd) or _UNKNOWN
    if not alignment.offset or not alignment.memory:
        raise UnavailableError(name, "this file admits no direct I/O (statx).", _REMEDY)
    if block_size % alignment.offset or alignment.memory > linux.PAGE:
        raise UnavailableError(
            name,
            f"direct I/O wants multiples of {alignment.offset} bytes here, "
            f"block_size is {block_size}.",
            f"Set block_size to a multiple of {alignment.offset}.",
        )
    return alignment


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def as_it_lies(
    image: FileImage, start: int, stop: int, alignment: linux.DioAlignment
) -> Bytes | None:
    """The bytes [start, stop) as one view that can be moved without a copy, or None."""
    if (stop - start) % alignment.offset or start % alignment.offset:
        return None
    views = image.views(start, stop)
    if len(views) != 1 or views[0].ctypes.data % alignment.memory:
        return None
    return views[0]
