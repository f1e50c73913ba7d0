"""A file system in memory (FUSE) whose reads and writes take a known time, for latency.py.

    python benchmarks/delays.py DIRECTORY       mounts it there until it is unmounted

A request takes the time that its offset decides: log-normal, 5 ms in the median, up to tens of ms.
So two programs that move the same blocks see the same latencies, whatever the machine does. Needs
root and `pip install mfusepy`, which uses Debian's libfuse2.
"""

from __future__ import annotations

import errno
import stat
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy as fuse
import numpy as np

_MEDIAN_S, _SPREAD = 0.005, 0.8
_REQUEST_BYTES = 64 * 1024


def delay_s(offset: int) -> float:
    """Return what a request at `offset` takes."""
    drawn = np.random.default_rng(offset // _REQUEST_BYTES).standard_normal()
    return float(_MEDIAN_S * np.exp(_SPREAD * drawn))


class Delays(fuse.Operations):
    """One directory tree in memory; of a file only its bytes, its mode and its size."""

    use_ns = True

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._directories = {"/"}

    def getattr(self, path: str, _: Any = None) -> dict[str, Any]:
        if path in self._directories:
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path not in self._files:
            raise fuse.FuseOSError(errno.ENOENT)
        size = len(self._files[path])
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, _: int) -> list[str]:
        below = [Path(one) for one in (*self._files, *self._directories - {"/"})]
        return [".", "..", *(one.name for one in below if str(one.parent) == path)]

    def create(self, path: str, _mode: int, _info: Any = None) -> int:
        self._files[path] = bytearray()
        return 0

    def mkdir(self, path: str, _mode: int) -> int:
        self._directories.add(path)
        return 0

    def rmdir(self, path: str) -> int:
        self._directories.discard(path)
        return 0

    def unlink(self, path: str) -> int:
        del self._files[path]
        return 0

    def rename(self, old: str, new: str) -> int:
        if old in self._directories:  # an empty one
            self._directories ^= {old, new}
        else:
            self._files[new] = self._files.pop(old)
        return 0

    def truncate(self, path: str, length: int, _: Any = None) -> int:
        file = self._files[path]
        del file[length:]
        file.extend(bytes(length - len(file)))
        return 0

    def read(self, path: str, size: int, offset: int, _: Any) -> bytes:
        until_s = time.perf_counter() + delay_s(offset)
        found = bytes(self._files[path][offset : offset + size])
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return found

    def write(self, path: str, data: bytes, offset: int, _: Any) -> int:
        until_s = time.perf_counter() + delay_s(offset)
        file = self._files[path]
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(data)] = data
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return len(data)

    def fsync(self, _path: str, _data: int, _info: Any) -> int:
        return 0

    def chmod(self, _path: str, _mode: int) -> int:
        return 0

    def chown(self, _path: str, _user: int, _group: int) -> int:
        return 0

    def utimens(self, _path: str, _times: Any = None) -> int:
        return 0


if __name__ == "__main__":
    fuse.FUSE(Delays(), sys.argv[1], foreground=True, nothreads=True, big_writes=True)
