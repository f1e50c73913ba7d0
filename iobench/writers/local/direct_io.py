"""Complete direct writes and reads: a short one is continued if the alignment permits it."""

from __future__ import annotations

import errno
import os

from iobench.errors import DataMismatchError
from iobench.writers.image import Bytes

__all__ = ["pread_direct", "pwrite_direct", "read_on", "written_on"]


def written_on(done: int, count: int, offset: int, alignment: int) -> int:
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


def pwrite_direct(fd: int, data: Bytes, offset: int, alignment: int) -> int:
    """Write all of `data`, a multiple of `alignment`, at `offset`; return the system calls made."""
    done = calls = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:].data, offset + done)
        calls += 1
        done = written_on(done, count, offset, alignment)
    return calls


def pread_direct(fd: int, block: Bytes, offset: int, wanted: int, alignment: int) -> int:
    """Fill `block` from `offset` with `wanted` bytes; return the number of system calls.

    `block` may be longer than `wanted`, up to the next multiple of `alignment`: the kernel reads
    less at the end of the file. Raises DataMismatchError when the file ends before.
    """
    done = calls = 0
    while done < wanted:
        count = os.preadv(fd, [block[done:].data], offset + done)
        calls += 1
        done = read_on(done, count, wanted, offset, alignment)
    return calls
