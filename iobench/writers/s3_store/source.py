"""S3Source: an object opened for small reads: headers, directories of archives, small files."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import numpy as np

from iobench.units import KIB
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import Bytes
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.download import S3Download
from iobench.writers.s3_store.target import S3Target
from iobench.writers.source import RangeSource
from iobench.writers.transfer import Meter

__all__ = ["S3Source"]

_AHEAD = 256 * KIB  # bytes of one fetch: another request costs more time than these bytes
_AT_ONCE = 16


class S3Source(RangeSource):
    """Reads and seeks in one version of an object. A miss is one ranged GET of 256 KiB or more."""

    def __init__(self, client: S3Client, target: S3Target) -> None:
        super().__init__()
        self._meter = Meter()
        self._download = S3Download(client, target, self._meter, verify=False)
        self.size_bytes = self._download.size_bytes
        self._cached_at = 0
        self._cached = b""

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        return map_in_workers(_AT_ONCE, lambda offset: self._fetch(offset, size), [*offsets])

    def _fill(self, offset: int, room: Bytes) -> int:
        data = np.frombuffer(self._at(offset, len(room)), dtype=np.uint8)
        room[: len(data)] = data
        return len(data)

    def _at(self, offset: int, size: int) -> bytes:
        begin = offset - self._cached_at
        if begin < 0 or begin + min(size, self.size_bytes - offset) > len(self._cached):
            # zip readers read the end of a file backwards, so the last 256 KiB are one fetch.
            at = max(0, min(offset, self.size_bytes - _AHEAD))
            self._cached = self._fetch(at, max(offset + size - at, _AHEAD))
            self._cached_at, begin = at, offset - at
        return self._cached[begin : begin + size]

    def _fetch(self, offset: int, size: int) -> bytes:
        if offset < 0:
            raise OSError(errno.EINVAL, f"a read at {offset}")
        end = min(offset + size, self.size_bytes)
        if end <= offset:
            return b""
        memory = np.empty(end - offset, dtype=np.uint8)
        self._download.fill([memory], offset, end, Meter())
        return memory.tobytes()
