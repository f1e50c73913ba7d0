"""Whole direct writes and reads: short ones are continued, where alignment lets them."""

from __future__ import annotations

import errno
import os

from iobench.errors import DataMismatchError
from iobench.writers.image import Bytes

__all__ = ["pread_direct", "pwrite_direct"]


def pwrite_direct(fd: int, data: Bytes, offset: int, alignment: int) -> int:
    """Write all of `data`, a multiple of `alignment`, at `offset`; the number of system calls."""
    done = calls = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:].data, offset + done)
        calls += 1
        done += count - count % alignment
        if count < alignment:
            raise OSError(errno.EIO, f"a direct write at {offset + done} took {count} bytes")
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
        if count == 0 or (done + count < wanted and count < alignment):
            raise DataMismatchError(f"the file ended at {offset + done + count} while being read")
        done += count if done + count >= wanted else count - count % alignment
    return calls
