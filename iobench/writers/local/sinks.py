"""Sinks of the page cache: plain, with RWF_DONTCACHE, or with write-back that starts at once."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from iobench import linux
from iobench.writers.image import Bytes
from iobench.writers.local.dontcache import on_storage
from iobench.writers.local.posix import pwrite_all
from iobench.writers.transfer import Meter

__all__ = ["PlainSink", "PushingSink", "Sink"]

_PUSH_BEHIND = 4  # blocks under write-back before the oldest is awaited
_START = linux.SYNC_FILE_RANGE_WRITE


class Sink(Protocol):
    """Writes bytes at an offset of one open file. Zero-copy: the kernel reads the views."""

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        """Write all of the consecutive `views` at `offset`."""

    def finish(self) -> None:
        """Finish pending work after the last write."""


class PlainSink:
    """pwritev with fixed flags: 0 for the page cache, RWF_DONTCACHE to leave no pages in it."""

    def __init__(self, fd: int, path: str, flags: int = 0) -> None:
        self._fd, self._path, self._flags = fd, path, flags

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        """Write all of the consecutive `views` at `offset`."""
        with meter.operation("write"):
            calls = pwrite_all(self._fd, views, offset, self._flags)
        meter.count(self._path, sum(map(len, views)), calls)

    def finish(self) -> None:
        """Do nothing: no work is pending after a write."""


class PushingSink:
    """Starts the write-back of each block at once and drops the pages of older blocks.

    sync_file_range starts and awaits write-back, then POSIX_FADV_DONTNEED frees the clean pages.
    Kernels before 6.14 offer this in place of RWF_DONTCACHE. One thread only.
    """

    def __init__(self, fd: int, path: str = "sync_file_range") -> None:
        self._fd, self._path = fd, path
        self._behind: deque[tuple[int, int]] = deque()

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        length = sum(map(len, views))
        with meter.operation("write"):
            calls = pwrite_all(self._fd, views, offset)
            linux.sync_file_range(self._fd, offset, length, _START)
            self._behind.append((offset, length))
            if len(self._behind) > _PUSH_BEHIND:
                self._drop_oldest()
        meter.count(self._path, length, calls)

    def finish(self) -> None:
        while self._behind:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        offset, length = self._behind.popleft()
        on_storage(self._fd, offset, length, drop=True)
