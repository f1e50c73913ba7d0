"""A file system (FUSE) whose reads and writes take a known time, for latency.py.

    python benchmarks/delays.py DIRECTORY       mounts it there until it is unmounted

Its files are in a directory of /dev/shm. A request takes the time that its offset decides:
log-normal, 5 ms in the median, up to tens of ms. So two programs that move the same blocks see the
same latencies, whatever the machine does. Needs root and `pip install mfusepy`, which uses Debian's
libfuse2.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mfusepy as fuse
import numpy as np

_MEDIAN_S, _SPREAD = 0.005, 0.8
_REQUEST_BYTES = 64 * 1024


@contextmanager
def delayed(offset: int) -> Iterator[None]:
    """Make the body take what a request at `offset` takes."""
    until_s = time.perf_counter()
    drawn = np.random.default_rng(offset // _REQUEST_BYTES).standard_normal()
    until_s += float(_MEDIAN_S * np.exp(_SPREAD * drawn))
    yield
    time.sleep(max(0.0, until_s - time.perf_counter()))


class Delays(fuse.Operations):
    """Passes each call on to the working directory."""

    use_ns = True

    def getattr(self, path: str, _: Any = None) -> dict[str, Any]:
        found = os.lstat(f".{path}")
        return {name: getattr(found, name) for name in ("st_mode", "st_nlink", "st_size")}

    def readdir(self, path: str, _: int) -> list[str]:
        return [".", "..", *os.listdir(f".{path}")]

    def create(self, path: str, mode: int, _: Any = None) -> int:
        return os.open(f".{path}", os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, _: int) -> int:
        return os.open(f".{path}", os.O_RDWR)

    def release(self, _: str, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(f".{path}", mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(f".{path}")

    def unlink(self, path: str) -> None:
        os.unlink(f".{path}")

    def rename(self, old: str, new: str) -> None:
        os.rename(f".{old}", f".{new}")

    def truncate(self, path: str, length: int, _: Any = None) -> None:
        os.truncate(f".{path}", length)

    def read(self, _: str, size: int, offset: int, fd: int) -> bytes:
        with delayed(offset):
            return os.pread(fd, size, offset)

    def write(self, _: str, data: bytes, offset: int, fd: int) -> int:
        with delayed(offset):
            return os.pwrite(fd, data, offset)

    def _nothing(self, *_: Any) -> int:
        return 0

    fsync = chmod = chown = utimens = _nothing


if __name__ == "__main__":
    at = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as below:
        os.chdir(below)
        fuse.FUSE(Delays(), at, foreground=True, nothreads=True, big_writes=True)
        os.chdir("/")
