"""DirectFile: a file open for direct I/O, and what that asks of memory and offsets."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from iobench import linux
from iobench.errors import UnavailableError
from iobench.writers.image import Bytes, FileImage

__all__ = [
    "NO_DIRECT_REMEDY",
    "REFUSED",
    "DirectFile",
    "aligned_view",
    "direct_alignment",
    "round_up",
]

REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""How a file system says that it has no direct I/O, or not this one."""
NO_DIRECT_REMEDY = (
    "Use --writer uncached or buffered, or a target on a file system with direct I/O."
)
_UNKNOWN = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
"""Assumed where statx does not tell: what every file system with direct I/O takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectFile:
    """A descriptor, and what direct I/O through it asks of addresses, offsets and lengths."""

    fd: int
    alignment: linux.DioAlignment


def direct_alignment(name: str, fd: int, block_size: int) -> linux.DioAlignment:
    """What O_DIRECT asks of the open file. Raises UnavailableError if that cannot be met."""
    alignment = linux.dio_alignment(fd) or _UNKNOWN
    if not alignment.offset or not alignment.memory:
        raise UnavailableError(name, "this file admits no direct I/O (statx).", NO_DIRECT_REMEDY)
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


def aligned_view(
    image: FileImage, start: int, stop: int, alignment: linux.DioAlignment
) -> Bytes | None:
    """The bytes [start, stop) as one view that can be moved without a copy, or None."""
    if image.on_device or (stop - start) % alignment.offset or start % alignment.offset:
        return None
    views = image.views(start, stop)
    if len(views) != 1 or views[0].ctypes.data % alignment.memory:
        return None
    return views[0]
