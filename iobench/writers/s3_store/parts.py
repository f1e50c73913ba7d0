"""Parts of an object: their sizes, their checksums, and request bodies without a copy.

awscrt computes the checksums, and combines those of parts without reading the bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from iobench.errors import OptionError, UnavailableError
from iobench.units import GIB, MIB, TIB, format_size, format_size_exact
from iobench.writers.base import ImageSource
from iobench.writers.image import Bytes, FileImage

_WIDTHS = {"crc64nvme": 8, "crc32c": 4}
ALGORITHMS = (*_WIDTHS, "none")


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """A full-object checksum algorithm of S3. boto3 uses its `name` in capitals."""

    name: str

    @classmethod
    def named(cls, name: str) -> Checksum | None:
        """Return the checksum called `name`, or None for `none`.

        Raises UnavailableError if awscrt is missing or too old.
        """
        if name == "none":
            return None
        try:
            from awscrt.checksums import combine_crc64nvme  # noqa: F401 -- of 2025 or later
        except ImportError as error:
            raise UnavailableError(
                "s3",
                f"checksum={name} needs awscrt, which is not installed or too old.",
                "Type: pip install -U 'iobench[s3]', or use checksum=none.",
            ) from error
        return cls(name=name)

    @classmethod
    def of_object(cls, answer: Mapping[str, Any]) -> tuple[Checksum, str] | None:
        """Return the checksum and its value from a HeadObject answer, or None if it has neither."""
        for name in _WIDTHS:
            if value := cls(name=name).value_in(answer):
                checksum = cls.named(name)
                assert checksum is not None
                return checksum, value
        return None

    def value_in(self, answer: Mapping[str, Any]) -> str:
        """Return the checksum of the whole object in `answer`, or an empty string.

        A COMPOSITE value (a checksum of the parts' checksums) is ignored: the object's bytes alone
        cannot reproduce it.
        """
        value = str(answer.get(self.field) or "")
        whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in value
        return value if whole else ""

    @property
    def algorithm(self) -> str:
        """The name in boto3's spelling: `CRC64NVME`."""
        return self.name.upper()

    @property
    def field(self) -> str:
        """The key of the value in requests and answers: `ChecksumCRC64NVME`."""
        return f"Checksum{self.algorithm}"

    def update(self, piece: Bytes | memoryview, value: int = 0) -> int:
        """Return the checksum after appending `piece` to bytes whose checksum is `value`."""
        from awscrt import checksums

        found: int = getattr(checksums, self.name)(piece, value)
        return found

    def of(self, views: Iterable[Bytes]) -> int:
        """Return the checksum of the concatenated views."""
        value = 0
        for view in views:
            value = self.update(view, value)
        return value

    def combined(self, parts: Iterable[tuple[int, int]]) -> int:
        """Return the checksum of the whole object from (checksum, size in bytes) of each part.

        The parts must be in order.
        """
        from awscrt import checksums

        combine = getattr(checksums, f"combine_{self.name}")
        value = 0
        for part, size_bytes in parts:
            value = combine(value, part, size_bytes)
        return value

    def text(self, value: int) -> str:
        """Return `value` in S3's notation: base64 of the big-endian bytes."""
        return base64.b64encode(value.to_bytes(_WIDTHS[self.name], "big")).decode()


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
PART_SMALLEST, PART_LARGEST = 5 * MIB, 5 * GIB
MOST_PARTS, MOST_BYTES = 10_000, 5 * TIB

_USUAL, _AMPLE = 8 * MIB, 64 * MIB
_PARTS_PER_THREAD = 4  # so that the last parts of all threads end at about the same time
_STEP = 900  # parts of one size before a stream of unknown length doubles the size


def part_size_for(size_bytes: int, *, fixed_bytes: int = 0, threads: int = 1) -> int:
    """Return the bytes of each part, except the last, of an object of `size_bytes`.

    The size is 8 to 64 MiB with several parts for each thread, or larger if 10,000 parts would not
    hold the object. `fixed_bytes` is used unchanged. Raises OptionError if the object is too large
    for S3 or needs too many parts of `fixed_bytes`.
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
    """Part sizes of an object whose length is unknown, or only expected.

    The first part has `first_bytes`; the size doubles every 900 parts, so that 10,000 parts hold
    5 TiB. With `fixed` it never grows.
    """

    first_bytes: int
    fixed: bool = False

    def size(self, number: int) -> int:
        """Return the bytes of part `number`, counted from 1."""
        if self.fixed:
            return self.first_bytes
        return min(self.first_bytes << ((number - 1) // _STEP), PART_LARGEST)


class PartBody(ImageSource):
    """The views of one part as the body of a request, without a copy. A retry can rewind it.

    `read` ignores its size and returns views of up to 1 MiB, which http.client passes to the
    socket. http.client itself asks for pieces of 16 KiB, which costs many more calls. Signing the
    payload reads by `readinto`.
    """

    _AT_ONCE = MIB

    def __init__(self, views: Sequence[Bytes]) -> None:
        super().__init__(FileImage.of("part", views))

    def __len__(self) -> int:
        return self.size_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = min(super().seek(offset, whence), self.size_bytes)
        return self._position

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        segments, position = self._image.segments, self._position
        if position == self.size_bytes:
            return b""
        segment = segments[bisect_right(segments, position, key=lambda one: one.offset) - 1]
        begin = position - segment.offset
        piece = cast(Bytes, segment.memory[begin : begin + self._AT_ONCE])
        self._position += len(piece)
        return piece.data  # type: ignore[return-value]  # sockets take a memoryview like bytes


@dataclass(frozen=True, kw_only=True)
class SentPart:
    """A part that the server has received."""

    etag: str
    size_bytes: int
    checksum: int


def etag_of(etags: Sequence[str]) -> str:
    """Return the ETag of an object made of such parts: the MD5 of their MD5s, and their number.

    Returns an empty string if the parts' ETags are not MD5s.
    """
    try:
        digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
