"""The file of `torch.save(state, path)` as an image: stock byte for byte, its storages not copied.

Stock torch writes the file itself, but for the storages: with `torch.serialization.skip_data` it
leaves room for them. The room is filled with the storages' own memory, and the CRC32s over
them, which torch then cannot know, are put in. So the zip's layout is torch's in every version, and
the checksums cost little: they are computed by several threads, at several GiB/s each.
"""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import types
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal import isal_zlib

from iobench.formats.tensors import tensor_memory
from iobench.formats.torch_settings import crc32_setting
from iobench.units import MIB
from iobench.writers.device import DeviceBytes
from iobench.writers.image import FileImage, Memory

__all__ = ["image"]

_THREADS = 2
_CENTRAL, _CENTRAL_BYTES = b"PK\x01\x02", 46  # APPNOTE 4.3.12
_DESCRIPTOR = b"PK\x07\x08"  # APPNOTE 4.3.9
_ID, _HASH_DIGITS = ".data/serialization_id", 20
_WORTH_A_THREAD = 8 * MIB
_PIECE = 64 * MIB


def image(path: str, state: Any, *, crc: bool = True, **options: Any) -> FileImage | None:
    """The image of the file that `torch.save(state, path, **options)` makes; None: see below.

    The image's memory is the storages' own: they must stay as they are while it is written.
    `crc=False` leaves out the zip's CRC32, as torch.serialization.set_crc32_options(False) does.
    `options` are torch.save's. What pickling raises is passed on. Storages on a CUDA device are
    copied to the host piece by piece for their CRC32. None for a state with storages anywhere
    else, and for a torch whose files are put together otherwise.
    """
    return _image(path, state, crc, options) if _is_like_stock() else None


def _image(path: str, state: Any, crc: bool, options: Mapping[str, Any]) -> FileImage | None:
    with tempfile.TemporaryDirectory(prefix="iobench-torch-") as directory:
        skeleton = os.path.join(directory, os.path.basename(path))
        storages = _save_skeleton(state, skeleton, crc, options)
        if not {storage.device.type for storage in storages.values()} <= {"cpu", "cuda"}:
            return None
        memories = {key: _memory(storage) for key, storage in storages.items()}
        with open(skeleton, "rb") as file:
            return _filled(path, _Skeleton(file), memories, crc)


def _save_skeleton(
    state: Any, path: str, crc: bool, options: Mapping[str, Any]
) -> dict[str, torch.UntypedStorage]:
    """Write all but the storages to `path`; the storages by their keys in the file."""
    storages: dict[str, torch.UntypedStorage] = {}
    stock: Any = options.get("pickle_module", pickle)

    class Recorder(stock.Pickler):  # type: ignore[misc]
        """torch derives its pickler from this, and tells by persistent_id what a storage is."""

        def __init_subclass__(cls) -> None:
            told = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                found = told(self, value)
                if found is not None:
                    typed = isinstance(value, torch.storage.TypedStorage)
                    storages[found[2]] = value._untyped_storage if typed else value
                return found

            cls.persistent_id = persistent_id

    module = types.SimpleNamespace(Pickler=Recorder, __name__=stock.__name__)
    with torch.serialization.skip_data(), crc32_setting(crc):
        torch.save(state, path, **{**options, "pickle_module": module})
    return storages


def _memory(storage: torch.UntypedStorage) -> Memory:
    return tensor_memory(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


class _Skeleton:
    """What stands where in the file that torch wrote, read from its central directory."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size_bytes = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            self.entries = archive.infolist()
            self.directory_start = archive.start_dir
        self.starts = [self._data_start(entry) for entry in self.entries]

    def _data_start(self, entry: zipfile.ZipInfo) -> int:
        header = os.pread(self.file.fileno(), 30, entry.header_offset)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return entry.header_offset + len(header) + lengths

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of what torch wrote."""
        data = bytearray(os.pread(self.file.fileno(), stop - start, start))
        if len(data) != stop - start:
            raise ValueError("torch's file is shorter than it was")
        return data


def _filled(path: str, skeleton: _Skeleton, memories: Mapping[str, Memory], crc: bool) -> FileImage:
    """The skeleton with the storages in their places, and the checksums that follow from them."""
    places = {
        start: memories[entry.filename.rpartition("/")[2]]
        for entry, start in zip(skeleton.entries, skeleton.starts, strict=True)
        if _is_storage(entry) and entry.file_size
    }
    checksums = _checksums(places) if crc else {}
    parts: list[Any] = []
    position = 0
    for start, memory in sorted(places.items()):
        parts += [skeleton.read(position, start), memory]
        position = start + len(memory)
    tail = skeleton.read(position, skeleton.size_bytes)
    parts.append(tail)
    if crc:
        for number, start in enumerate(sorted(places)):
            _put_descriptor(parts[2 * number + 2], 0, checksums[start])
        _put_checksums(skeleton, tail, position, checksums)
    return FileImage.of(path, parts)


def _is_storage(entry: zipfile.ZipInfo) -> bool:
    folder, _, name = entry.filename.rpartition("/")
    return folder.endswith("/data") and name.isdigit()


def _checksums(places: Mapping[int, Memory]) -> dict[int, int]:
    """CRC32 of each memory."""
    if sum(map(len, places.values())) < _WORTH_A_THREAD:
        return {start: _crc32(memory) for start, memory in places.items()}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="iobench-crc") as pool:
        return dict(zip(places, pool.map(_crc32, places.values()), strict=True))


def _crc32(memory: Memory) -> int:
    if not isinstance(memory, DeviceBytes):
        return int(isal_zlib.crc32(memory))
    found = 0
    for start in range(0, len(memory), _PIECE):
        found = isal_zlib.crc32(memory[start : start + _PIECE].tensor.cpu().numpy(), found)
    return found


def _put_checksums(
    skeleton: _Skeleton, tail: bytearray, tail_start: int, checksums: Mapping[int, int]
) -> None:
    """Put what follows from the storages' checksums into `tail`, the file from `tail_start` on.

    That is the id, of which the last 20 digits are all other records' checksums hashed one after
    the other, empty records left out (PyTorchStreamWriter::writeSerializationId), and the directory
    at the end.
    """
    found, combined = [], 0
    for entry, start in zip(skeleton.entries, skeleton.starts, strict=True):
        checksum = checksums.get(start, entry.CRC) if _is_storage(entry) else entry.CRC
        if entry.filename.endswith(_ID):
            at = start - tail_start
            tail[at + _HASH_DIGITS : at + 2 * _HASH_DIGITS] = b"%020d" % combined
            checksum = isal_zlib.crc32(tail[at : at + 2 * _HASH_DIGITS])
            _put_descriptor(tail, at + 2 * _HASH_DIGITS, checksum)
        if entry.file_size:
            combined = _hash_combine(combined, checksum)
        found.append(checksum)
    at = skeleton.directory_start - tail_start
    for checksum in found:
        _expect(tail, at, _CENTRAL)
        tail[at + 16 : at + 20] = checksum.to_bytes(4, "little")
        lengths = (int.from_bytes(tail[at + n : at + n + 2], "little") for n in (28, 30, 32))
        at += _CENTRAL_BYTES + sum(lengths)


def _put_descriptor(piece: bytearray, at: int, checksum: int) -> None:
    _expect(piece, at, _DESCRIPTOR)
    piece[at + 4 : at + 8] = checksum.to_bytes(4, "little")


def _expect(piece: bytearray, at: int, signature: bytes) -> None:
    if piece[at : at + len(signature)] != signature:
        raise ValueError(f"torch's file has no {signature!r} where one belongs")


def _hash_combine(seed: int, value: int) -> int:
    """c10::hash_combine of 64 bits."""
    mask = (1 << 64) - 1
    return seed ^ ((value + 0x9E3779B9 + (seed << 6 & mask) + (seed >> 2)) & mask)


@functools.cache
def _is_like_stock() -> bool:
    """Whether a small state comes out as this torch saves it, byte for byte."""
    state = {"a": torch.arange(5.0), "b": [torch.arange(9)[2:4], torch.zeros(0)], "c": 1}
    with tempfile.TemporaryDirectory(prefix="iobench-torch-") as directory:
        file = os.path.join(directory, "state.pt")
        for crc in (True, False):
            with crc32_setting(crc):
                torch.save(state, file)
            try:
                made = _image("state.pt", state, crc, {})
            except (ValueError, LookupError, zipfile.BadZipFile):
                return False
            assert made is not None
            joined = b"".join(view.tobytes() for view in made.views(0, made.size_bytes))
            if joined != Path(file).read_bytes():
                return False
    return True
