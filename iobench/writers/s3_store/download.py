"""S3Download: reads one object with ranged GETs into memory. S3Source: inspects an object."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from iobench.errors import DataMismatchError, TransferError
from iobench.units import KIB, MIB
from iobench.writers.base import RangeSource
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import Bytes
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.errors import CorruptedError, require_fields
from iobench.writers.s3_store.parts import MOST_BYTES, Checksum
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter

RANGED_GET = "ranged get"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_AT_ONCE = MIB  # bytes per checksum step, few enough to be still in the processor's cache


class S3Download:
    """One version of the object `target`, identified by the ETag of the first answer.

    Raises TransferError (ENOENT) if the object does not exist.
    """

    def __init__(self, client: S3Client, target: S3Target, meter: Meter, *, verify: bool) -> None:
        self._client, self._target = client, target
        self._where = {"Bucket": target.bucket, "Key": target.key}
        self.stop = threading.Event()
        mode = {"ChecksumMode": "ENABLED"} if verify else {}
        with meter.phase("open"):
            found = self._call(
                lambda s3: _described(s3.head_object(**self._where, **mode)), "opening", meter
            )
        self.size_bytes: int = found["ContentLength"]
        self._etag = found["ETag"]
        known = Checksum.of_object(found) if verify else None
        self._checksum = known[0] if known else None
        self._expected = known[1] if known else ""
        self._ranges: dict[int, tuple[int, int]] = {}  # begin: (checksum, bytes)

    def fill(self, views: Sequence[Bytes], begin: int, end: int, meter: Meter) -> None:
        """Fill `views` with the bytes [begin, end). A retry continues where a connection broke."""
        state = _Filling(views, self._checksum)

        def attempt(s3: Any) -> None:
            start = begin + state.filled
            answer = s3.get_object(
                **self._where, Range=f"bytes={start}-{end - 1}", IfMatch=self._etag
            )
            body = answer["Body"]
            try:
                self._check(answer, start, end, meter)
                state.fill(_fastest(body))
            except BaseException:
                body.close()
                raise
            body._raw_stream.release_conn()

        with meter.operation("read"):
            self._call(attempt, f"reading bytes {begin} to {end}", meter)
        meter.count(RANGED_GET, end - begin)
        self._ranges[begin] = (state.value, end - begin)

    def verify(self, meter: Meter) -> None:
        """Compare the checksum of all ranges with the object's. Without one, record a fallback.

        Raises DataMismatchError if they differ.
        """
        if self._checksum is None:
            meter.fell_back(
                "the object's checksum compared on restore",
                "its size and ETag",
                "the server returns no checksum of the whole object",
            )
            return
        found = self._checksum.combined(self._ranges[begin] for begin in sorted(self._ranges))
        if self._checksum.text(found) != self._expected:
            raise DataMismatchError(
                f"{self._target}: the restored bytes have {self._checksum.name} "
                f"{self._checksum.text(found)}, the object's is {self._expected}"
            )

    def _call(self, request: Any, doing: str, meter: Meter) -> Any:
        return self._client.call(request, meter, doing=doing, where=self._target, stop=self.stop)

    def _check(self, answer: Any, start: int, end: int, meter: Meter) -> None:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        sent = _RANGE.fullmatch(answer.get("ContentRange", ""))
        exact = sent is not None and (int(sent[1]), int(sent[2])) == (start, end - 1)
        if not exact or answer.get("ContentLength") != end - start:
            raise TransferError(
                f"{self._target}: bytes {start} to {end} were asked for, the server answered "
                f"{status} with {answer.get('ContentRange') or 'no Content-Range'} and "
                f"{answer.get('ContentLength', 'an unknown number of')} bytes; this server cannot "
                "be read by ranges"
            )
        if answer.get("ETag") != self._etag or (sent and int(sent[3]) != self.size_bytes):
            raise DataMismatchError(
                f"{self._target}: was changed while it was read (another ETag); restore it again"
            )
        if status != 206:
            meter.fell_back(
                "206 Partial Content",
                f"{status} with the right Content-Range",
                "the server answers a ranged GET with this status",
            )


def _described(found: Any) -> Any:
    """Return the HeadObject answer `found`. Raises CorruptedError if it describes no object."""
    size = require_fields(found, "ETag", "ContentLength")["ContentLength"]
    if not 0 <= size <= MOST_BYTES:
        raise CorruptedError(f"the server says that the object has {size} bytes, S3 holds 5 TiB")
    return found


def _fastest(body: Any) -> Any:
    """Return the reader that fills memory without a copy: http.client's response inside urllib3's.

    Otherwise urllib3's response itself, which also decodes a chunked body.
    """
    raw = body._raw_stream
    inner: Any = getattr(raw, "_fp", None)
    return raw if inner is None or getattr(raw, "chunked", False) else inner


class _Filling:
    """Fills views in order, and keeps its position and checksum across broken connections."""

    def __init__(self, views: Sequence[Bytes], checksum: Checksum | None) -> None:
        self._pieces = [
            view.data[start : start + _AT_ONCE]
            for view in views
            for start in range(0, len(view), _AT_ONCE)
        ]
        self._checksum = checksum
        self._index = 0
        self._within = 0
        self.filled = 0
        self.value = 0

    def fill(self, source: Any) -> None:
        while self._index < len(self._pieces):
            piece = self._pieces[self._index]
            while self._within < len(piece):
                count = source.readinto(piece[self._within :])
                if not count:
                    raise ConnectionError(f"the body ended after {self.filled} bytes")
                self._within += count
                self.filled += count
            if self._checksum is not None:
                self.value = self._checksum.update(piece, self.value)
            self._index += 1
            self._within = 0


_AHEAD = 256 * KIB  # bytes of one fetch: another request costs more time than these bytes
_RANGES_AT_ONCE = 16


class S3Source(RangeSource):
    """Reads and seeks in one version of an object. A miss is one ranged GET of 256 KiB or more."""

    def __init__(self, client: S3Client, target: S3Target) -> None:
        super().__init__()
        self._meter = Meter()
        self._download = S3Download(client, target, self._meter, verify=False)
        self.size_bytes = self._download.size_bytes
        self._cached_at = 0
        self._cached = np.empty(0, dtype=np.uint8)

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        found = map_in_workers(_RANGES_AT_ONCE, lambda at: self._fetch(at, size), [*offsets])
        return [one.tobytes() for one in found]

    def _fill(self, offset: int, room: Bytes) -> int:
        begin = offset - self._cached_at
        if begin < 0 or begin + min(len(room), self.size_bytes - offset) > len(self._cached):
            # zip readers read the end of a file backwards, so the last 256 KiB are one fetch.
            at = max(0, min(offset, self.size_bytes - _AHEAD))
            self._cached = self._fetch(at, max(offset + len(room) - at, _AHEAD))
            self._cached_at, begin = at, offset - at
        data = self._cached[begin : begin + len(room)]
        room[: len(data)] = data
        return len(data)

    def _fetch(self, offset: int, size: int) -> Bytes:
        if offset < 0:
            raise OSError(errno.EINVAL, f"a read at {offset}")
        memory = np.empty(max(0, min(size, self.size_bytes - offset)), dtype=np.uint8)
        if len(memory):
            self._download.fill([memory], offset, offset + len(memory), Meter())
        return memory
