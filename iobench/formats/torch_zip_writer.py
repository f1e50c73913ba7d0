"""The bytes of a torch zip around its storages, in the layout of torch's own zip writer.

torch writes a file only, and reading that file again takes longer than to lay it out here. Each
record is padded so that its data begin at a multiple of the alignment. `torch_ending` takes the
version and a hash of the records' names from torch itself, once for a number of storages.
`torch_image` compares the result with torch's before the first use.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import Any, NamedTuple

import torch
from isal import isal_zlib

from iobench.formats.torch_zip import ZipDirectory
from iobench.writers.source import BytesSource

__all__ = ["Recorded", "ZipText", "torch_ending"]

_LOCAL = struct.Struct("<4s2xH18x2H")  # APPNOTE 4.3.7
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")  # 4.3.9
_ENTRY = struct.Struct("<4s4xH6x3L2H10xL")  # 4.3.12
_END_64 = struct.Struct("<4sQ2H8x4Q")  # 4.3.14
_LOCATOR = struct.Struct("<4s4xQL")  # 4.3.15
_END = struct.Struct("<4s4x2H2L2x")  # 4.3.16
_EMPTY, _DESCRIBED = 0x0800, 0x0808
_FULL, _FULL_16 = 0xFFFFFFFF, 0xFFFF


class Recorded(NamedTuple):
    """A record that torch writes itself."""

    name: str
    data: bytes


class ZipText:
    """Collects the bytes of a file except those of its storages."""

    def __init__(self, folder: str, alignment: int, *, crc: bool) -> None:
        self._prefix = folder.encode() + b"/"
        self._alignment, self._crc = alignment, crc
        self._parts: list[bytes] = []
        self._entries: list[bytes] = []
        self.size_bytes = 0
        """The size of the file up to here."""
        self._pads: dict[int, bytes] = {}
        self.entries: list[int] = []
        """The offset of each record's entry in the directory."""
        self.directory_bytes = 0

    def add(self, record: Recorded) -> tuple[int, int]:
        """Add a record with its data. Return the offset of the data, and their CRC32."""
        checksum = isal_zlib.crc32(record.data) if self._crc else 0
        return self._add(record.name.encode(), len(record.data), record.data, checksum), checksum

    def add_storage(self, key: int, size_bytes: int) -> int:
        """Add the storage `key` without its data and their CRC32. Return the offset of its data."""
        return self._add(b"data/%d" % key, size_bytes, b"", 0)

    def _add(self, name: bytes, size: int, data: bytes, checksum: int) -> int:
        name = self._prefix + name
        header, length = self.size_bytes, len(name)
        wide, extra, entry_extra = header >= _FULL or size >= _FULL, b"", b""
        if wide:  # torch does not know the packed size when it writes the local header
            extra, entry_extra = _extra_64(header, size, 0), _extra_64(header, size, size)
        start = header + _LOCAL.size + length + len(extra) + 4
        pad = -start % self._alignment
        filling = self._pads.get(pad)
        if filling is None:
            filling = self._pads[pad] = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        flags = _DESCRIBED if size else _EMPTY
        local = _LOCAL.pack(b"PK\x03\x04", flags, length, len(extra) + len(filling))
        self._parts += (local, name, extra, filling, data)
        start += pad
        self.size_bytes = start + size
        if size:
            packed = _DESCRIPTOR_64 if wide else _DESCRIPTOR
            self._parts.append(packed.pack(b"PK\x07\x08", checksum, size, size))
            self.size_bytes += packed.size
        short, place = min(size, _FULL), min(header, _FULL)
        entry = _ENTRY.pack(
            *(b"PK\x01\x02", flags, checksum, short, short, length, len(extra), place)
        )
        self._entries.append(entry + name + entry_extra)
        self.entries.append(self.directory_bytes)
        self.directory_bytes += len(entry) + length + len(extra)
        return start

    def end(self) -> bytearray:
        """Return all bytes, with the directory."""
        start, size, count = self.size_bytes, self.directory_bytes, len(self._entries)
        end = start + size
        few = min(count, _FULL_16)
        return bytearray().join(
            (
                *self._parts,
                *self._entries,
                _END_64.pack(b"PK\x06\x06", 44, 0x031E, 0x2D, count, count, size, start),
                _LOCATOR.pack(b"PK\x06\x07", end, 1),
                _END.pack(b"PK\x05\x06", few, few, min(size, _FULL), min(start, _FULL)),
            )
        )


def _extra_64(header: int, size: int, packed: int) -> bytes:
    """Return the extra field with what exceeds 32 bits (APPNOTE 4.5.3)."""
    values = ([size, packed] if size >= _FULL else []) + ([header] if header >= _FULL else [])
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


class SparseText:
    """A file object that keeps what torch's zip writer writes, and leaves out what it skips."""

    def __init__(self) -> None:
        self.text = io.BytesIO()
        self._skipped = 0

    def write(self, data: Any) -> int:
        return self.text.write(data)

    def tell(self) -> int:
        return self.text.tell() + self._skipped

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._skipped += offset if whence == io.SEEK_CUR else offset - self.tell()
        return self.tell()

    def flush(self) -> None: ...


@functools.lru_cache(maxsize=64)
def torch_ending(names: tuple[str, ...], count: int) -> tuple[Recorded, ...]:
    """Return the records that torch adds after those of `names` and `count` storages.

    The last one is the serialization id; its second half depends on the records' CRC32s.
    """
    sink: Any = SparseText()
    zip_file: Any = torch._C.PyTorchFileWriter(sink, True, 64)
    for name in names:
        zip_file.write_record(name, b"", 0)
    for key in range(count):
        zip_file.write_record_metadata(f"data/{key}", 0)
    zip_file.write_end_of_file()
    source = BytesSource(sink.text.getvalue())
    found = ZipDirectory.read(source)
    last = list(range(len(names) + count, len(found.names)))
    records = []
    for number, start in zip(last, found.data_starts(source, last), strict=True):
        source.seek(start)
        name = found.names[number].partition("/")[2]
        records.append(Recorded(name, source.read(found.sizes[number])))
    return tuple(records)
