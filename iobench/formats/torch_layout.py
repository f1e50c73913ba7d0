"""TorchLayout: the bytes of a torch file that torch wrote, and the positions of its storages."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from iobench.formats.checked_image import CheckedImage, RunningChecksums
from iobench.formats.tensors import storages_bytes, tensor_memory
from iobench.formats.torch_zip import HASH_DIGITS, hash_combine
from iobench.formats.torch_zip_writer import Recorded, ZipText, torch_ending
from iobench.units import MIB
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import AnyMemory, Bytes, FileImage

__all__ = ["TorchLayout"]

_THREADS = 2
_CHECKSUM = struct.Struct("<L")
_CRC_OF_ENTRY = 16  # APPNOTE 4.3.12
_WORTH_A_THREAD = 8 * MIB


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Positions in `TorchLayout.text` that depend on the CRC32s of the non-empty storages."""

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
        text = ZipText(folder, alignment, crc=crc)
        before = 0
        for record in records:
            before = hash_combine(before, text.add(record)[1])
        lengths = [storage.nbytes() for storage in storages]
        starts = [text.add_storage(key, length) for key, length in enumerate(lengths)]
        *others, last = torch_ending(tuple(record.name for record in records), len(storages))
        after = [text.add(record)[1] for record in others]
        filled = [key for key, length in enumerate(lengths) if length]
        if not crc:  # each CRC32 is 0
            combined = functools.reduce(hash_combine, [0] * len(filled) + after, before)
            last = Recorded(last.name, _serialization_id(last.data, combined))
        id_start, _ = text.add(last)
        skipped = sum(lengths)
        entries = [text.size_bytes - skipped + entry + _CRC_OF_ENTRY for entry in text.entries]
        whole = text.end()
        stops = (starts[key] + lengths[key] for key in filled)
        before_stop = itertools.accumulate(lengths[key] for key in filled)
        missing = Missing(
            before=before,
            after=after,
            descriptors=[stop - less + 4 for stop, less in zip(stops, before_stop, strict=True)],
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

    def without_storages(self) -> TorchLayout:
        """Return the same without references to storages, for a caller that has copied them."""
        return replace(self, storages={})

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

        checksums = RunningChecksums(memories, put, self._put_tail)
        return CheckedImage(self.path, self._all_parts(memories), checksums)

    def image_in(self, memory: Bytes) -> FileImage:
        """Return the file in `memory`, which already contains the storages at their offsets."""
        self._put_checksums({s: memory[s : s + size] for s, size in self.sizes.items()})
        for start, text in self._texts():
            np.copyto(memory[start : start + len(text)], text)
        return FileImage.of(self.path, [memory[: self.size_bytes]])

    def _put_checksums(self, memories: Mapping[int, Bytes]) -> None:
        if not self.missing:
            return
        checksums = _checksums(memories)
        for start, place in zip(self.sizes, self.missing.descriptors, strict=True):
            _CHECKSUM.pack_into(self.text, place, checksums[start])
        self._put_tail(checksums)

    def _put_tail(self, checksums: Mapping[int, int]) -> None:
        """Write everything that depends on the storages' checksums after the last storage.

        These are the serialization id and the central directory. The last 20 digits of the id are a
        hash of the checksums of all other records in order, without empty records
        (PyTorchStreamWriter::writeSerializationId).
        """
        missing, text = self.missing, self.text
        assert missing is not None
        combined = missing.before
        for start, entry in zip(self.sizes, missing.entries, strict=True):
            checksum = checksums[start]
            combined = hash_combine(combined, checksum)
            _CHECKSUM.pack_into(text, entry, checksum)
        combined = functools.reduce(hash_combine, missing.after, combined)
        at, stop = missing.id_start, missing.id_start + 2 * HASH_DIGITS
        text[at:stop] = _serialization_id(text[at:stop], combined)
        own = isal_zlib.crc32(text[at:stop])
        for place in (stop + 4, missing.id_entry):
            _CHECKSUM.pack_into(text, place, own)


def _serialization_id(old: bytes | bytearray, combined: int) -> bytes:
    return bytes(old[:HASH_DIGITS]) + b"%020d" % combined


def _checksums(memories: Mapping[int, Bytes]) -> dict[int, int]:
    """Return the CRC32 of each memory."""
    if sum(map(len, memories.values())) < _WORTH_A_THREAD:
        return {start: isal_zlib.crc32(memory) for start, memory in memories.items()}
    found = map_in_workers(_THREADS, isal_zlib.crc32, list(memories.values()))
    return dict(zip(memories, found, strict=True))
