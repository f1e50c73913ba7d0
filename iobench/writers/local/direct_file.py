"""DirectFile: a file open for direct I/O, its alignment, and complete direct writes and reads."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.errors import DataMismatchError, UnavailableError
from iobench.writers.blocks.pages import in_huge_pages
from iobench.writers.image import Bytes, Extent

REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""Errors of a file system without direct I/O, or that refuses this operation."""
NO_DIRECT_REMEDY = (
    "Use --writer uncached or buffered, or a target on a file system with direct I/O."
)
_UNKNOWN = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
"""Used where statx reports no alignment: every file system with direct I/O accepts it."""


class DirectFile(NamedTuple):
    """A descriptor, and the alignment that direct I/O needs of addresses, offsets and lengths."""

    fd: int
    alignment: linux.DioAlignment
    name: str = ""
    """Named in the errors of operations that are in flight with those of other files."""


def direct_alignment(name: str, fd: int, block_size: int) -> linux.DioAlignment:
    """Return the alignment that O_DIRECT needs here. Raises UnavailableError if impossible."""
    alignment = linux.dio_alignment(fd) or _UNKNOWN
    if not alignment.offset or not alignment.memory:
        raise UnavailableError(name, "this file admits no direct I/O (statx).", NO_DIRECT_REMEDY)
    if block_size % alignment.offset or alignment.memory > linux.PAGE:
        raise UnavailableError(
            name,
            f"direct I/O needs multiples of {alignment.offset} bytes here, "
            f"block_size is {block_size}.",
            f"Set block_size to a multiple of {alignment.offset}.",
        )
    return alignment


def reopened(fd: int, flags: int, writer: str, name: str, block_size: int) -> DirectFile:
    """Open the file of `fd` once more with O_DIRECT, also if its name has changed since.

    Raises UnavailableError where the file system refuses that, or /proc is not mounted.
    """
    try:
        direct = os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:  # not of the file, which is open
            reason = "O_DIRECT needs /proc, which is not mounted."
        elif error.errno in REFUSED:
            reason = f"the file system of {os.path.dirname(name) or '.'} refuses O_DIRECT."
        else:
            raise
        raise UnavailableError(writer, reason, NO_DIRECT_REMEDY) from error
    try:
        return DirectFile(direct, direct_alignment(writer, direct, block_size), name)
    except BaseException:
        os.close(direct)
        raise


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def view_to_fill(part: Extent, alignment: linux.DioAlignment) -> Bytes | None:
    """Return the bytes of `part` as one view for a direct read; None if it must go by a block.

    Blocks are in huge pages. Memory in small pages has a segment for each of them, and a request
    has a limited number, such as 254. So several requests are needed for a block, which take longer
    than the read of a block and a copy (docs/decisions/0033). New memory is in small pages where
    huge ones are slow to make.
    """
    view = aligned_view(part, alignment)
    small = view is not None and host_takes_free_memory() and not in_huge_pages(view)
    return None if small else view


def aligned_view(part: Extent, alignment: linux.DioAlignment) -> Bytes | None:
    """Return the bytes of `part` as one view that direct I/O can use, or None."""
    if part.image.on_device or part.size_bytes % alignment.offset or part.start % alignment.offset:
        return None
    if not part.size_bytes or not part.image.in_one_piece(part.start, part.stop):
        return None
    (view,) = part.image.views(part.start, part.stop)
    return None if view.ctypes.data % alignment.memory else view


def written_on(done: int, count: int, wanted: int, offset: int, alignment: int) -> int:  # noqa: ARG001 -- like `read_on`
    """Return the bytes done after a write that began at `done` and took `count` bytes.

    `offset` is where the whole operation began in the file. A direct write continues at a multiple
    of `alignment`. Raises OSError when less than one such unit was taken.
    """
    if count < alignment:  # rounded down to the alignment this is 0: no progress
        raise OSError(errno.EIO, f"a write at {offset + done} took {count} bytes")
    return done + count - count % alignment


def read_on(done: int, count: int, wanted: int, offset: int, alignment: int) -> int:
    """Return the bytes done after a read that began at `done` and returned `count` bytes.

    `offset` is where the whole operation began in the file. It may be longer than `wanted`, up to
    the next multiple of `alignment`. Raises DataMismatchError when the file ended.
    """
    if count == 0 or (done + count < wanted and count < alignment):
        raise DataMismatchError(f"the file ended at {offset + done + count} while being read")
    return done + (count if done + count >= wanted else count - count % alignment)
