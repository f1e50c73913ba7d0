"""TorchLayout: the bytes of a torch file that torch wrote, and the positions of its storages."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import numpy as np
import torch
from isal import isal_zlib

from iobench.formats.checked_image import CheckedImage, RunningChecksums
from iobench.formats.tensors import tensor_memory
from iobench.units import MIB
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.device.base import DeviceBytes
from iobench.writers.image import Bytes, FileImage, Memory

__all__ = ["TorchLayout"]

_THREADS = 2
_CENTRAL, _CENTRAL_BYTES = b"PK\x01\x02", 46  # APPNOTE 4.3.12
_DESCRIPTOR = b"PK\x07\x08"  # APPNOTE 4.3.9
_ID, _HASH_DIGITS = ".data/serialization_id", 20
_WORTH_A_THREAD = 8 * MIB
_PIECE = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class TorchLayout:
    """The file `path` of `size_bytes`. `texts` and `storages` are by offset in the file.

    `texts` are the bytes that torch wrote, without the checksums of storages. Make a new object for
    every save: the checksums are written into `texts`.
    """

    path: str
    size_bytes: int
    texts: Mapping[int, bytearray] = field(repr=False)
    sizes: Mapping[int, int]
    """Bytes of each storage, by offset."""
    storages: Mapping[int, torch.UntypedStorage] = field(repr=False)
    devices: frozenset[str]
    """Device types of the storages: `cpu`, `cuda`."""
    records: Sequence[tuple[zipfile.ZipInfo, int]] = ()
    """Each record of the zip with the offset of its data; empty when no checksum is missing."""
    directory_start: int = 0

    @classmethod
    def read(
        cls, path: str, file: BinaryIO, storages: Mapping[str, torch.UntypedStorage], *, crc: bool
    ) -> TorchLayout:
        """Read the layout of `file`, which torch wrote with gaps for `storages`, given by key.

        Raises ValueError, LookupError or BadZipFile for a file of an unknown structure.
        """
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            entries, directory_start = archive.infolist(), archive.start_dir
        starts = [_data_start(file, entry) for entry in entries]
        placed = {
            start: storages[entry.filename.rpartition("/")[2]]
            for entry, start in zip(entries, starts, strict=True)
            if _is_storage(entry) and entry.file_size
        }
        texts: dict[int, bytearray] = {}
        position = 0
        for start in sorted(placed):
            texts[position] = _read(file, position, start)
            position = start + placed[start].nbytes()
        texts[position] = _read(file, position, size)
        return cls(
            path=path,
            size_bytes=size,
            texts=texts,
            sizes={start: storage.nbytes() for start, storage in placed.items()},
            storages=placed,
            devices=frozenset(storage.device.type for storage in storages.values()),
            records=[*zip(entries, starts, strict=True)] if crc else (),
            directory_start=directory_start,
        )

    @classmethod
    def of_bytes(cls, path: str, data: bytearray) -> TorchLayout:
        """Return the layout of a whole file that torch wrote: one text, no storages."""
        texts = {0: data}
        return cls(
            path=path, size_bytes=len(data), texts=texts, sizes={}, storages={}, devices=frozenset()
        )

    def without_storages(self) -> TorchLayout:
        """Return the same without references to storages, for a caller that has copied them."""
        return replace(self, storages={})

    def memories(self) -> dict[int, Memory]:
        """Return the storages' host or CUDA memory, by offset in the file."""
        return {
            start: tensor_memory(
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            )
            for start, storage in self.storages.items()
        }

    def unchecked(self, memories: Mapping[int, Memory]) -> FileImage:
        """Return the file with `memories` for the storages, without their checksums."""
        parts = sorted([*self.texts.items(), *memories.items()], key=lambda part: part[0])
        return FileImage.of(self.path, [part for _, part in parts])

    def image(self, memories: Mapping[int, Memory]) -> FileImage:
        """Return the file with `memories` for the storages, with their checksums.

        Checksums of host memory are computed while the image is written, others here.
        """
        host = {s: m for s, m in memories.items() if not isinstance(m, DeviceBytes)}
        if not self.records or len(host) < len(memories):
            self._put_checksums(memories)
            return self.unchecked(memories)
        checksums = RunningChecksums(host, self._put_checksum, self._put_tail)
        return CheckedImage.over(self.unchecked(memories), checksums)

    def image_in(self, memory: Bytes) -> FileImage:
        """Return the file in `memory`, which already contains the storages at their offsets."""
        self._put_checksums({s: memory[s : s + size] for s, size in self.sizes.items()})
        for start, text in self.texts.items():
            np.copyto(memory[start : start + len(text)], np.frombuffer(text, dtype=np.uint8))
        return FileImage.of(self.path, [memory[: self.size_bytes]])

    def _put_checksums(self, memories: Mapping[int, Memory]) -> None:
        if not self.records:
            return
        checksums = _checksums(memories)
        for start, checksum in checksums.items():
            self._put_checksum(start, checksum)
        self._put_tail(checksums)

    def _put_checksum(self, start: int, checksum: int) -> None:
        """Write a storage's checksum into the data descriptor after it."""
        _put_descriptor(self.texts[start + self.sizes[start]], 0, checksum)

    def _put_tail(self, checksums: Mapping[int, int]) -> None:
        """Write everything that depends on the storages' checksums into the last text.

        These are the serialization id and the central directory. The last 20 digits of the id are a
        hash of the checksums of all other records in order, without empty records
        (PyTorchStreamWriter::writeSerializationId).
        """
        tail_start = max(self.texts)
        tail = self.texts[tail_start]
        found, combined = [], 0
        for entry, start in self.records:
            checksum = checksums.get(start, entry.CRC) if _is_storage(entry) else entry.CRC
            if entry.filename.endswith(_ID):
                at = start - tail_start
                tail[at + _HASH_DIGITS : at + 2 * _HASH_DIGITS] = b"%020d" % combined
                checksum = isal_zlib.crc32(tail[at : at + 2 * _HASH_DIGITS])
                _put_descriptor(tail, at + 2 * _HASH_DIGITS, checksum)
            if entry.file_size:
                combined = _hash_combine(combined, checksum)
            found.append(checksum)
        at = self.directory_start - tail_start
        for checksum in found:
            _expect(tail, at, _CENTRAL)
            tail[at + 16 : at + 20] = checksum.to_bytes(4, "little")
            lengths = (int.from_bytes(tail[at + n : at + n + 2], "little") for n in (28, 30, 32))
            at += _CENTRAL_BYTES + sum(lengths)


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    header = os.pread(file.fileno(), 30, entry.header_offset)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return entry.header_offset + len(header) + lengths


def _read(file: BinaryIO, start: int, stop: int) -> bytearray:
    data = bytearray(os.pread(file.fileno(), stop - start, start))
    if len(data) != stop - start:
        raise ValueError("torch's file is shorter than it was")
    return data


def _is_storage(entry: zipfile.ZipInfo) -> bool:
    folder, _, name = entry.filename.rpartition("/")
    return folder.endswith("/data") and name.isdigit()


def _checksums(memories: Mapping[int, Memory]) -> dict[int, int]:
    """Return the CRC32 of each memory."""
    if sum(map(len, memories.values())) < _WORTH_A_THREAD:
        return {start: _crc32(memory) for start, memory in memories.items()}
    found = map_in_workers(_THREADS, _crc32, list(memories.values()))
    return dict(zip(memories, found, strict=True))


def _crc32(memory: Memory) -> int:
    if not isinstance(memory, DeviceBytes):
        return int(isal_zlib.crc32(memory))
    found = 0
    for start in range(0, len(memory), _PIECE):
        found = isal_zlib.crc32(memory[start : start + _PIECE].tensor.cpu().numpy(), found)
    return found


def _put_descriptor(piece: bytearray, at: int, checksum: int) -> None:
    _expect(piece, at, _DESCRIPTOR)
    piece[at + 4 : at + 8] = checksum.to_bytes(4, "little")


def _expect(piece: bytearray, at: int, signature: bytes) -> None:
    if piece[at : at + len(signature)] != signature:
        raise ValueError(f"torch's file has no {signature!r} at offset {at} of its text")


def _hash_combine(seed: int, value: int) -> int:
    """c10::hash_combine of 64 bits."""
    mask = (1 << 64) - 1
    return seed ^ ((value + 0x9E3779B9 + (seed << 6 & mask) + (seed >> 2)) & mask)
