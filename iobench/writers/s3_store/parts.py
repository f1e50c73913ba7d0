"""Parts of an object: how large they are, and how their bytes reach the socket without a copy."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iobench.errors import OptionError
from iobench.units import GIB, MIB, TIB, format_size, format_size_exact
from iobench.writers.image import Bytes

__all__ = [
    "MOST_BYTES",
    "MOST_PARTS",
    "PART_LARGEST",
    "PART_SMALLEST",
    "PartBody",
    "SentPart",
    "StreamParts",
    "etag_of",
    "part_size_for",
]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
PART_SMALLEST, PART_LARGEST = 5 * MIB, 5 * GIB
MOST_PARTS, MOST_BYTES = 10_000, 5 * TIB

_USUAL, _AMPLE = 8 * MIB, 64 * MIB
_PARTS_PER_THREAD = 4  # so that the last parts of all threads end at about the same time
_STEP = 900  # parts of one size before a stream of unknown length doubles it


def part_size_for(size_bytes: int, *, fixed_bytes: int = 0, threads: int = 1) -> int:
    """Bytes of each part but the last of an object of `size_bytes`.

    8 to 64 MiB, several for each thread, and more where 10,000 parts would not do. `fixed_bytes`
    is taken as it is. Raises OptionError when the object cannot be had in parts of that size.
    """
    if size_bytes > MOST_BYTES:
        raise OptionError(
            f"an object of {format_size(size_bytes)} is more than S3 holds "
            f"({format_size(MOST_BYTES)}); split the checkpoint into more files"
        )
    least = -(-size_bytes // MOST_PARTS)
    if fixed_bytes:
        if fixed_bytes < least:
            raise OptionError(
                f"option part_size={format_size_exact(fixed_bytes)}: {format_size(size_bytes)} "
                f"would be more than {MOST_PARTS:,} parts; use at least "
                f"{format_size_exact(-(-least // MIB) * MIB)}, or 0 to have it chosen"
            )
        return fixed_bytes
    wanted = min(max(size_bytes // (threads * _PARTS_PER_THREAD), _USUAL), _AMPLE)
    return -(-max(wanted, least) // MIB) * MIB


@dataclass(frozen=True, kw_only=True)
class StreamParts:
    """Sizes of the parts of an object whose length is not known, or only expected.

    `even` parts of `first_bytes`, then parts that double every 900, so that 10,000 of them hold
    5 TiB. With `fixed` they never grow.
    """

    first_bytes: int
    even: int = _STEP
    fixed: bool = False

    @classmethod
    def expecting(cls, size_bytes: int | None, *, fixed_bytes: int, threads: int) -> StreamParts:
        """Sizes for about `size_bytes`."""
        if fixed_bytes:
            return cls(first_bytes=fixed_bytes, fixed=True)
        expected = min(size_bytes or 0, MOST_BYTES)
        first = part_size_for(expected, threads=threads)
        if 2 * expected > first * MOST_PARTS:  # too few parts are left for growing to 5 TiB
            first = part_size_for(min(2 * expected, MOST_BYTES), threads=threads)
        return cls(first_bytes=first, even=max(_STEP, min(-(-expected // first), MOST_PARTS)))

    def size(self, number: int) -> int:
        """Bytes of part `number`, which counts from 1."""
        if self.fixed or number <= self.even:
            return self.first_bytes
        return min(self.first_bytes << ((number - self.even - 1) // _STEP + 1), PART_LARGEST)


class PartBody(io.RawIOBase):
    """The views of one part as the body of a request: read without a copy, from the start again.

    `read` gives views of up to 1 MiB however little was asked for, which the HTTP client passes to
    the socket as they are; it would otherwise cut everything into pieces of 16 KiB.
    """

    _AT_ONCE = MIB

    def __init__(self, views: Sequence[Bytes]) -> None:
        super().__init__()
        self._views = [view.data for view in views]
        self._size = sum(map(len, self._views))
        self._index = self._within = self._position = self._last = 0

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = left = min(max(base + offset, 0), self._size)
        self._index = 0
        while self._index < len(self._views) and left >= len(self._views[self._index]):
            left -= len(self._views[self._index])
            self._index += 1
        self._within = left
        return self._position

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        if self._index == len(self._views):
            self._last = 0
            return b""
        view = self._views[self._index]
        piece = view[self._within : self._within + self._AT_ONCE]
        self._last = len(piece)
        self._within += len(piece)
        self._position += len(piece)
        if self._within == len(view):
            self._index += 1
            self._within = 0
        return piece  # type: ignore[return-value]  # a memoryview: as good as bytes to a socket

    def readinto(self, buffer: Any) -> int:
        """As signing reads it, by a copy; `read` is what sending uses."""
        room = memoryview(buffer).cast("B")
        piece = memoryview(self.read())[: len(room)]
        room[: len(piece)] = piece
        self.seek(self._position - self._last + len(piece))
        return len(piece)


@dataclass(frozen=True, kw_only=True)
class SentPart:
    """A part that the server has."""

    etag: str
    size_bytes: int
    checksum: int


def etag_of(parts: Sequence[SentPart]) -> str:
    """The ETag of an object of these parts: the MD5 of theirs; empty where theirs are no MD5s."""
    try:
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
