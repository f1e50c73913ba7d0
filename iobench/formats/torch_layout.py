"""TorchLayout: the bytes of a torch file that torch wrote, and the positions of its storages."""

from __future__ import annotations

import functools
import io
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from iobench.formats.checked_image import CheckedImage, RunningChecksums
from iobench.formats.tensors import storages_bytes, tensor_memory
from iobench.formats.torch_zip import HASH_DIGITS, Recorded, ZipDirectory, ZipText, hash_combine
from iobench.writers.base import BytesSource
from iobench.writers.image import AnyMemory, Bytes, FileImage

_CHECKSUM = struct.Struct("<L")
_CRC_OF_DESCRIPTOR = 4  # APPNOTE 4.3.9
_CRC_OF_ENTRY = 16  # APPNOTE 4.3.12


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Positions in the text of a file that depend on the CRC32s of the non-empty storages."""

    before: int
    """The combined CRC32s of the records before the storages."""
    after: Sequence[int]
    """The CRC32s of those between the storages and the serialization id."""
    descriptors: Sequence[int]
    entries: Sequence[int]
    """Positions of each storage's CRC32: after its data, and in the directory."""
    id_start: int
    id_entry: int
    """Positions of the serialization id, and of its CRC32 in the directory."""

    def put(self, text: bytearray, checksums: Sequence[int]) -> None:
        """Write the CRC32s of the storages into `text`, and all that depends on them.

        The last 20 digits of the serialization id are a hash of the checksums of all other records
        in order, without empty records (PyTorchStreamWriter::writeSerializationId).
        """
        for places in (self.descriptors, self.entries):
            for at, checksum in zip(places, checksums, strict=True):
                _CHECKSUM.pack_into(text, at, checksum)
        combined = functools.reduce(hash_combine, (*checksums, *self.after), self.before)
        at, stop = self.id_start, self.id_start + 2 * HASH_DIGITS
        text[at:stop] = _serialization_id(text[at:stop], combined)
        own = isal_zlib.crc32(text[at:stop])
        for at in (stop + _CRC_OF_DESCRIPTOR, self.id_entry):
            _CHECKSUM.pack_into(text, at, own)


@dataclass(frozen=True, kw_only=True)
class TorchLayout:
    """The file `path` of `size_bytes`. `sizes` and `storages` are by offset in the file.

    `text` are the bytes of the file without the storages, and without their checksums. Make a new
    object for every save: the checksums are written into `text`.
    """

    path: str
    size_bytes: int
    text: bytearray = field(repr=False)
    sizes: Mapping[int, int] = field(repr=False)
    """Bytes of each non-empty storage, in the order of the file."""
    storages: Mapping[int, torch.UntypedStorage] = field(repr=False)
    devices: frozenset[str]
    """Device types of the storages: `cpu`, `cuda`."""
    missing: Missing | None = field(default=None, repr=False)
    """None when no checksum is missing."""

    @classmethod
    def of(
        cls,
        path: str,
        folder: str,
        records: Sequence[Recorded],
        storages: Sequence[torch.UntypedStorage],
        *,
        alignment: int,
        crc: bool,
    ) -> TorchLayout:
        """Return the layout of a zip of `folder` with these records, then the storages by key."""
        text = ZipText(folder, alignment)

        def add(record: Recorded) -> tuple[int, int]:
            checksum = isal_zlib.crc32(record.data) if crc else 0
            return text.add(record, checksum), checksum

        before = 0
        for record in records:
            before = hash_combine(before, add(record)[1])
        lengths = [storage.nbytes() for storage in storages]
        starts = [text.add_storage(key, length) for key, length in enumerate(lengths)]
        *others, last = torch_ending(tuple(record.name for record in records), len(storages))
        after = [add(record)[1] for record in others]
        filled = [key for key, length in enumerate(lengths) if length]
        if not crc:  # each CRC32 is 0
            combined = functools.reduce(hash_combine, [0] * len(filled) + after, before)
            last = Recorded(last.name, _serialization_id(last.data, combined))
        id_start, _ = add(last)
        skipped = sum(lengths)
        entries = [text.size_bytes - skipped + entry + _CRC_OF_ENTRY for entry in text.entries]
        whole = text.end()
        before_stop = itertools.accumulate(lengths[key] for key in filled)
        ends = [
            starts[key] + lengths[key] - less for key, less in zip(filled, before_stop, strict=True)
        ]
        missing = Missing(
            before=before,
            after=after,
            descriptors=[at + _CRC_OF_DESCRIPTOR for at in ends],
            entries=[entries[len(records) + key] for key in filled],
            id_start=id_start - skipped,
            id_entry=entries[-1],
        )
        return cls(
            path=path,
            size_bytes=len(whole) + skipped,
            text=whole,
            sizes={starts[key]: lengths[key] for key in filled},
            storages={starts[key]: storages[key] for key in filled},
            devices=frozenset({storage.device.type for storage in storages}),
            missing=missing if crc else None,
        )

    @classmethod
    def of_bytes(cls, path: str, data: bytearray) -> TorchLayout:
        """Return the layout of a whole file that torch wrote: one text, no storages."""
        return cls(
            path=path, size_bytes=len(data), text=data, sizes={}, storages={}, devices=frozenset()
        )

    def memories(self) -> dict[int, AnyMemory]:
        """Return the storages' host or CUDA memory, by offset in the file."""
        if self.devices <= {"cpu"}:
            return dict(zip(self.storages, storages_bytes([*self.storages.values()]), strict=True))
        return {
            start: tensor_memory(
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            )
            for start, storage in self.storages.items()
        }

    def _texts(self) -> Iterator[tuple[int, Bytes]]:
        """Yield the bytes before each storage and after the last, with their offset in the file."""
        text = np.frombuffer(self.text, dtype=np.uint8)
        position = skipped = 0
        for start, size in self.sizes.items():
            yield position + skipped, text[position : start - skipped]
            position = start - skipped
            skipped += size
        yield position + skipped, text[position:]

    def unchecked(self, memories: Mapping[int, AnyMemory]) -> FileImage:
        """Return the file with `memories` for the storages, without their checksums."""
        return FileImage.of(self.path, self._all_parts(memories))

    def _all_parts(self, memories: Mapping[int, Any]) -> list[Any]:
        *texts, (_, last) = self._texts()
        parts: list[Any] = []
        for (_, text), start in zip(texts, self.sizes, strict=True):
            parts += (text, memories[start])
        return [*parts, last]

    def image(self, memories: Mapping[int, AnyMemory]) -> FileImage:
        """Return the file with `memories` for the storages, with their checksums.

        The checksums are computed while the image is written.
        """
        if not self.missing:
            return self.unchecked(memories)
        places = dict(zip(self.sizes, self.missing.descriptors, strict=True))

        def put(start: int, checksum: int) -> None:
            _CHECKSUM.pack_into(self.text, places[start], checksum)

        checksums = RunningChecksums(memories, put, self._put)
        return CheckedImage(self.path, self._all_parts(memories), {0: checksums})

    def streamed(self, checksum: Callable[[], int]) -> Iterator[Bytes | int]:
        """Yield the file in order: text, and in place of each storage its offset.

        `checksum` then returns the CRC32 of the storage.
        """
        *texts, (_, last) = self._texts()
        checksums: dict[int, int] = {}
        for number, ((_, text), start) in enumerate(zip(texts, self.sizes, strict=True)):
            yield text
            yield start
            checksums[start] = checksum()
            if self.missing:
                _CHECKSUM.pack_into(self.text, self.missing.descriptors[number], checksums[start])
        if self.missing:
            self._put(checksums)
        yield last

    def _put(self, checksums: Mapping[int, int]) -> None:
        assert self.missing is not None
        self.missing.put(self.text, [checksums[start] for start in self.sizes])


def _serialization_id(old: bytes | bytearray, combined: int) -> bytes:
    return bytes(old[:HASH_DIGITS]) + b"%020d" % combined


@functools.lru_cache(maxsize=64)
def torch_ending(names: tuple[str, ...], count: int) -> tuple[Recorded, ...]:
    """Return the records that torch adds after those of `names` and `count` storages.

    The last one is the serialization id; its second half depends on the records' CRC32s.
    """
    sink = io.BytesIO()
    zip_file: Any = torch._C.PyTorchFileWriter(sink, True, 64)
    for name in names:
        zip_file.write_record(name, b"", 0)
    for key in range(count):
        zip_file.write_record_metadata(f"data/{key}", 0)
    zip_file.write_end_of_file()
    source = BytesSource(sink.getvalue())
    found = ZipDirectory.read(source)
    last = list(range(len(names) + count, len(found.names)))
    records = []
    for number, start in zip(last, found.data_starts(source, last), strict=True):
        source.seek(start)
        name = found.names[number].partition("/")[2]
        records.append(Recorded(name, source.read(found.sizes[number])))
    return tuple(records)
