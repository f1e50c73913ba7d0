"""Whole direct writes and reads: short ones are continued, where alignment lets them."""

from __future__ import annotations

import errno
import os

from iobench.errors import DataMismatchError
from iobench.writers.image import Bytes

__all__ = ["pread_direct", "pwrite_direct", "read_on", "written_on"]


def written_on(done: int, count: int, offset: int, alignment: int) -> int:
    """How much is done when a write of what is left behind `done` bytes took `count`.

    The operation began at `offset`. Raises OSError when what was taken allows no going on.
    """
    if count < alignment:
        raise OSError(errno.EIO, f"a write at {offset + done} took {count} bytes")
    return done + count - count % alignment


def read_on(done: int, count: int, wanted: int, offset: int, alignment: int) -> int:
    """How much is done when a read of what is left behind `done` bytes gave `count`.

    The operation began at `offset` and may be longer than `wanted`, up to the next multiple of
    `alignment`. Raises DataMismatchError when the file ended.
    """
    if count == 0 or (done + count < wanted and count < alignment):
        raise DataMismatchError(f"the file ended at {offset + done + count} while being read")
    return done + (count if done + count >= wanted else count - count % alignment)


def pwrite_direct(fd: int, data: Bytes, offset: int, alignment: int) -> int:
    """Write all of `data`, a multiple of `alignment`, at `offset`; the number of system calls."""
    done = calls = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:].data, offset + done)
        calls += 1
        done = written_on(done, count, offset, alignment)
    return calls


def pread_direct(fd: int, block: Bytes, offset: int, wanted: int, alignment: int) -> int:
    """Fill `block` from `offset` until `wanted` bytes are there; the number of system calls.

    `block` may be longer than `wanted`, up to the next multiple of `alignment`: at the end of a
    file the kernel gives less. Raises DataMismatchError when the file ends before.
    """
    done = calls = 0
    while done < wanted:
        count = os.preadv(fd, [block[done:].data], offset + done)
        calls += 1
        done = read_on(done, count, wanted, offset, alignment)
    return calls
