"""torch's zip: its directory (APPNOTE 4.3), and the bytes and sizes of one to be written.

torch writes a file only, and reading that file again takes longer than to lay it out here. Each
record is padded so that its data begin at a multiple of the alignment. The arithmetic is that of
PyTorchStreamWriter, torch >= 2.6 (caffe2/serialize/inline_container.cc): stored records, a data
descriptor after each, and always the zip64 end records. `torch_image` compares the result with
torch's before the first use.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast
from zipfile import ZIP_STORED, BadZipFile

if TYPE_CHECKING:
    from iobench.writers.base import Source

ALIGNMENT = 64
"""Of the data of each record, by default."""

HASH_DIGITS = 20
"""Each half of `.data/serialization_id`: a hash of the records' names, and one of their CRC32s."""

_LOCAL = struct.Struct("<4s2xH18x2H")  # APPNOTE 4.3.7
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")  # 4.3.9
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")  # 4.3.12
_END_64 = struct.Struct("<4sQ2H8x4Q")  # 4.3.14
_LOCATOR = struct.Struct("<4s4xQL")  # 4.3.15
_END = struct.Struct("<4s4x2H2LH")  # 4.3.16
_END_BYTES = _END_64.size + _LOCATOR.size + _END.size
_EXTRA_64 = 1  # id of the extra field with sizes and offsets of 64 bits
_FULL, _FULL_16 = 0xFFFFFFFF, 0xFFFF
_TAIL = 66 * 1024  # the end of a file is read at once; a comment can have 64 KiB
_UTF_8, _DESCRIBED = 0x0800, 8  # flags of torch; _DESCRIBED: sizes and checksum follow the data


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
            mark, *_, count, length, start = _END_64.unpack_from(tail, stop - begin)
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
            at = begin + name + extra + comment
        if at != length:
            raise BadZipFile("its directory has another length")

    def data_starts(self, opened: Source, numbers: list[int]) -> list[int]:
        """Return the offset of each record's data: after the local header, its name and padding.

        A header that the caller can do without is not read: one page per record, or one request per
        record of a bucket, would cost more than the records. torch's data are aligned, and end
        where the descriptor before the next header begins. The first and the last header prove it.
        """
        import numpy as np  # a list of workloads, which knows sizes of zips, does not need it

        if len(numbers) <= 2:
            return _after_headers(opened, [self.headers[number] for number in numbers])
        all_headers = np.array(self.headers, dtype=np.int64)
        headers, sizes = all_headers[numbers], np.array(self.sizes, dtype=np.int64)[numbers]
        following = np.append(np.sort(all_headers), self.start)
        stops = following[np.searchsorted(following, headers, side="right")]
        wide = np.maximum(headers, sizes) >= _FULL
        described = np.array(self.described)[numbers] > 0
        starts = stops - sizes - np.where(described, np.where(wide, 24, 16), 0)
        if not np.any(starts % ALIGNMENT) and np.all(starts > headers):
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
        offset + _LOCAL.size + sum(struct.unpack_from("<2H", header, 26))
        for offset, header in zip(offsets, opened.read_at(offsets, _LOCAL.size), strict=True)
    ]


class _Place(NamedTuple):
    """Where the data of a record begin, and how the record is described."""

    start: int
    wide: bool
    """Whether its size or its offset exceeds 32 bits."""
    stop: int
    """Where the next record begins."""
    entry_bytes: int

    @classmethod
    def of(cls, header: int, name_bytes: int, size: int, alignment: int) -> _Place:
        """Place the record of `size` bytes whose local header is at `header`."""
        large, far = size >= _FULL, header >= _FULL
        wide = large or far
        extra = 4 * wide + 16 * large + 8 * far
        start = header + _LOCAL.size + name_bytes + extra + 4
        start += -start % alignment
        descriptor = (_DESCRIPTOR_64.size if wide else _DESCRIPTOR.size) if size else 0
        return cls(start, wide, start + size + descriptor, _ENTRY.size + name_bytes + extra)


def zip_bytes(folder: str, records: Iterable[tuple[str, int]]) -> int:
    """Return the size of a zip of `folder` with `records` of these names and sizes in bytes."""
    position = directory = 0
    for name, size in records:
        place = _Place.of(position, len(folder) + 1 + len(name), size, ALIGNMENT)
        position, directory = place.stop, directory + place.entry_bytes
    return position + directory + _END_BYTES


class Recorded(NamedTuple):
    """A record that torch writes itself."""

    name: str
    data: bytes


class ZipText:
    """Collects the bytes of a file except those of its storages."""

    def __init__(self, folder: str, alignment: int) -> None:
        self._prefix = folder.encode() + b"/"
        self._alignment = alignment
        self._parts: list[bytes] = []
        self._entries: list[bytes] = []
        self.size_bytes = 0
        """The size of the file up to here."""
        self._pads: dict[int, bytes] = {}
        self.entries: list[int] = []
        """The offset of each record's entry in the directory."""
        self.directory_bytes = 0

    def add(self, record: Recorded, checksum: int) -> int:
        """Add a record with its data, whose CRC32 is `checksum`. Return the offset of the data."""
        return self._add(record.name.encode(), len(record.data), record.data, checksum)

    def add_storage(self, key: int, size_bytes: int) -> int:
        """Add the storage `key` without its data and their CRC32. Return the offset of its data."""
        return self._add(b"data/%d" % key, size_bytes, b"", 0)

    def _add(self, name: bytes, size: int, data: bytes, checksum: int) -> int:
        name = self._prefix + name
        header, length = self.size_bytes, len(name)
        place = _Place.of(header, length, size, self._alignment)
        extra = entry_extra = b""
        if place.wide:  # torch does not know the packed size when it writes the local header
            extra, entry_extra = _extra_64(header, size, 0), _extra_64(header, size, size)
        pad = place.start - header - _LOCAL.size - length - len(extra) - 4
        filling = self._pads.get(pad)
        if filling is None:
            filling = self._pads[pad] = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        flags = _UTF_8 | _DESCRIBED if size else _UTF_8
        local = _LOCAL.pack(b"PK\x03\x04", flags, length, len(extra) + len(filling))
        self._parts += (local, name, extra, filling, data)
        if size:
            packed = _DESCRIPTOR_64 if place.wide else _DESCRIPTOR
            self._parts.append(packed.pack(b"PK\x07\x08", checksum, size, size))
        short, at = min(size, _FULL), min(header, _FULL)
        entry = _ENTRY.pack(
            *(b"PK\x01\x02", flags, ZIP_STORED, checksum, short, short, length, len(extra), 0, at)
        )
        self._entries.append(entry + name + entry_extra)
        self.entries.append(self.directory_bytes)
        self.size_bytes = place.stop
        self.directory_bytes += place.entry_bytes
        return place.start

    def end(self) -> bytearray:
        start, size, count = self.size_bytes, self.directory_bytes, len(self._entries)
        few = min(count, _FULL_16)
        return bytearray().join(
            (
                *self._parts,
                *self._entries,
                _END_64.pack(b"PK\x06\x06", 44, 0x031E, 0x2D, count, count, size, start),
                _LOCATOR.pack(b"PK\x06\x07", start + size, 1),
                _END.pack(b"PK\x05\x06", few, few, min(size, _FULL), min(start, _FULL), 0),
            )
        )


def _extra_64(header: int, size: int, packed: int) -> bytes:
    """Return the extra field with what exceeds 32 bits (APPNOTE 4.5.3)."""
    values = ([size, packed] if size >= _FULL else []) + ([header] if header >= _FULL else [])
    return struct.pack(f"<2H{len(values)}Q", _EXTRA_64, 8 * len(values), *values)


def hash_combine(seed: int, value: int) -> int:
    """c10::hash_combine of 64 bits."""
    mask = (1 << 64) - 1
    return seed ^ ((value + 0x9E3779B9 + (seed << 6 & mask) + (seed >> 2)) & mask)
