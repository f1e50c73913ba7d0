"""The records of a torch zip, read from the directory at its end (APPNOTE 4.3)."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from typing import cast
from zipfile import ZIP_STORED, BadZipFile

import numpy as np

from iobench.writers.source import Source

__all__ = ["HASH_DIGITS", "ZipDirectory", "hash_combine"]

HASH_DIGITS = 20
"""Each half of `.data/serialization_id`: a hash of the records' names, and one of their CRC32s."""

_END = struct.Struct("<4s4x2H2LH")
_END_64 = struct.Struct("<4s20x4Q")
_LOCATOR = struct.Struct("<4s4xQ4x")
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")
_LOCAL_HEADER = 30  # bytes before the name and the extra field
_EXTRA_64 = 1  # id of the extra field with sizes and offsets of 64 bits
_FULL = 0xFFFFFFFF
_TAIL = 66 * 1024  # the end of a file is read at once; a comment can have 64 KiB
_ALIGNMENT = 64
_DESCRIBED = 8  # flag: sizes and checksum follow the data


@dataclass(frozen=True, kw_only=True)
class ZipDirectory:
    """The directory of a zip file: everything from `start` to the file's end.

    Each record has one value in each list: a tuple per record would be an object for the garbage
    collector, which takes longer than all the rest.
    """

    size_bytes: int
    start: int
    data: bytes = field(repr=False)
    names: list[str] = field(default_factory=list, repr=False)
    sizes: list[int] = field(default_factory=list, repr=False)
    headers: list[int] = field(default_factory=list, repr=False)
    """The offset of each record's local header in the file."""
    described: list[int] = field(default_factory=list, repr=False)
    """Not 0 for a record with a descriptor after its data."""
    checksums: list[int] = field(default_factory=list, repr=False)
    """The CRC32 of each record."""
    entries: list[int] = field(default_factory=list, repr=False)
    """The offset of each record's entry in the directory."""
    compressed: set[str] = field(default_factory=set, repr=False)
    """The names of the records whose bytes are not in the file as they are."""

    @classmethod
    def read(cls, opened: Source) -> ZipDirectory:
        """Read the directory. Raises BadZipFile or struct.error for any other file."""
        size = opened.seek(0, io.SEEK_END)
        begin = max(0, size - _TAIL)
        tail = _read(opened, begin, size)
        end = tail.rfind(b"PK\x05\x06")
        if end < 0:
            raise BadZipFile("it has no zip directory")
        _, _, count, length, start, _ = _END.unpack_from(tail, end)
        stop = begin + end
        locator = end - _LOCATOR.size
        if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
            stop = _LOCATOR.unpack_from(tail, locator)[1]
            if not begin <= stop <= begin + locator - _END_64.size:
                raise BadZipFile("the end of its directory is not where it must be")
            mark, _, count, length, start = _END_64.unpack_from(tail, stop - begin)
            if mark != b"PK\x06\x06":
                raise BadZipFile("its directory has no end")
        if start + length != stop:
            raise BadZipFile("its directory is not where it must be")
        data = tail[start - begin :] if start >= begin else _read(opened, start, begin) + tail
        found = cls(size_bytes=size, start=start, data=data)
        found._add(count, length)
        return found

    def _add(self, count: int, length: int) -> None:
        """Add the `count` records of the directory, whose entries have `length` bytes."""
        at, data = 0, self.data
        unpack, fixed = _ENTRY.unpack_from, _ENTRY.size
        for _ in range(count):
            mark, flags, method, crc, packed, size, name, extra, comment, header = unpack(data, at)
            if mark != b"PK\x01\x02":
                raise BadZipFile("its directory is damaged")
            begin = at + fixed
            if _FULL in (size, packed, header):
                size, packed, header = _wide(data, begin + name, extra, [size, packed, header])
            text = data[begin : begin + name].decode("utf-8", "surrogateescape")
            if method != ZIP_STORED or packed != size:
                self.compressed.add(text)
            self.names.append(text)
            self.sizes.append(size)
            self.headers.append(header)
            self.described.append(flags & _DESCRIBED)
            self.checksums.append(crc)
            self.entries.append(at)
            at = begin + name + extra + comment
        if at != length:
            raise BadZipFile("its directory has another length")

    def data_starts(self, opened: Source, numbers: list[int]) -> list[int]:
        """Return the offset of each record's data: after the local header, its name and padding.

        A header that the caller can do without is not read: one page per record, or one request per
        record of a bucket, would cost more than the records. torch's data are aligned, and end
        where the descriptor before the next header begins. The first and the last header prove it.
        """
        if len(numbers) <= 2:
            return _after_headers(opened, [self.headers[number] for number in numbers])
        all_headers = np.array(self.headers, dtype=np.int64)
        headers, sizes = all_headers[numbers], np.array(self.sizes, dtype=np.int64)[numbers]
        following = np.append(np.sort(all_headers), self.start)
        stops = following[np.searchsorted(following, headers, side="right")]
        wide = np.maximum(headers, sizes) >= _FULL
        described = np.array(self.described)[numbers] > 0
        starts = stops - sizes - np.where(described, np.where(wide, 24, 16), 0)
        if not np.any(starts % _ALIGNMENT) and np.all(starts > headers):
            ends = [0, -1]
            if _after_headers(opened, headers[ends].tolist()) == starts[ends].tolist():
                return cast(list[int], starts.tolist())
        return _after_headers(opened, headers.tolist())


def _read(opened: Source, start: int, stop: int) -> bytes:
    opened.seek(start)
    data = opened.read(stop - start)
    if len(data) != stop - start:
        raise BadZipFile("it ends too early")
    return data


def _wide(data: bytes, at: int, length: int, values: list[int]) -> list[int]:
    """Return size, packed size and offset, with those of 64 bits from the extra field."""
    stop = at + length
    while at + 4 <= stop:
        kind, length = struct.unpack_from("<2H", data, at)
        at += 4
        if kind == _EXTRA_64:
            wide = iter(struct.unpack_from(f"<{values.count(_FULL)}Q", data, at))
            return [next(wide) if value == _FULL else value for value in values]
        at += length
    return values


def _after_headers(opened: Source, offsets: list[int]) -> list[int]:
    """Return the offset of the data after the local header at each of `offsets`."""
    return [
        offset + _LOCAL_HEADER + sum(struct.unpack_from("<2H", header, 26))
        for offset, header in zip(offsets, opened.read_at(offsets, _LOCAL_HEADER), strict=True)
    ]


def hash_combine(seed: int, value: int) -> int:
    """c10::hash_combine of 64 bits."""
    mask = (1 << 64) - 1
    return seed ^ ((value + 0x9E3779B9 + (seed << 6 & mask) + (seed >> 2)) & mask)
