"""The file of `torch.save(state, path)` as an image, identical to stock, without copied storages.

Stock torch pickles the state and names its storages, but is stopped before it writes them. The
image has their own memory and adds their CRC32s. The checksums cost little, because they are
computed while the file is written (docs/decisions/0034). No setting of torch is changed meanwhile:
the state's own methods and signal handlers may call torch.save and torch.load.

Some files have no image, and callers let torch write them: the format before torch 1.6, and files
of an unknown torch version.

TorchLayout: torch's bytes of a file, and the positions of its storages.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import pickle
import struct
import threading
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib
from torch.serialization import DEFAULT_PROTOCOL

from iobench.formats.many_parts import CheckedImage, RunningChecksums
from iobench.formats.tensors import storages_bytes, tensor_memory
from iobench.formats.torch_zip import HASH_DIGITS, Recorded, ZipDirectory, ZipText, hash_combine
from iobench.writers.base import ImageSource
from iobench.writers.image import AnyMemory, Bytes, FileImage

_CHECKSUM = struct.Struct("<L")
_CRC_OF_DESCRIPTOR = 4  # APPNOTE 4.3.9
_CRC_OF_ENTRY = 16  # APPNOTE 4.3.12
_LAST = "byteorder"  # the last record before the storages
STREAM = "archive"
"""torch's name of the zip folder for a stream, and for a path that is not ASCII."""

_settings_lock = threading.RLock()
"""Held while torch's settings differ from the caller's."""


def image(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> FileImage | None:
    """Return the image of the file of `torch.save(state, target/path, **options)`.

    Returns None for a state without an image (see the module), and for storages on other devices
    than CPU and CUDA. The image shares the storages' memory: they must not change during the write.
    `crc=False` leaves out the CRC32, like torch.serialization.set_crc32_options(False). `options`
    are those of torch.save. Passes on what pickling raises.
    """
    found = layout(path, state, target, crc=crc, **options)
    if found is None or not found.devices <= {"cpu", "cuda"}:
        return None
    return found.image(found.memories())


def layout(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> TorchLayout | None:
    """Return torch's own bytes of that file and the position of each storage, on any device.

    The storages' bytes are not read. Returns None for a state without an image (see the module).
    """
    if not options.get("_use_new_zipfile_serialization", True) or not is_like_stock():
        return None
    whole = os.path.join(target, path)
    folder = _folder(os.path.basename(path)) if whole.isascii() else STREAM
    return _layout(path, folder, state, crc, options)


def _layout(
    path: str, folder: str, state: Any, crc: bool, options: Mapping[str, Any]
) -> TorchLayout:
    records, storages = _pickled(state, **options)
    alignment: int = torch.serialization._get_storage_alignment()
    return TorchLayout.of(path, folder, records, storages, alignment=alignment, crc=crc)


def _folder(name: str) -> str:
    """Return the folder in the zip of a file of this ASCII name: without its last suffix.

    The rule of torch is in caffe2/serialize/inline_container.cc. It takes a backslash for a slash.
    Raises RuntimeError, like torch, if nothing is left.
    """
    base = name.rpartition("\\")[2]
    folder = base[: base.rfind(".")] if "." in base else base
    if not folder:
        raise RuntimeError(f"invalid file name: {name}")
    return folder


class _Complete(Exception):  # noqa: N818 -- no error
    """All records before the storages are written."""


class _Records:
    """The zip file that torch writes to: it keeps the records before the storages."""

    def __init__(self) -> None:
        self.written: list[Recorded] = []

    def write_record(self, name: str, data: str | bytes, size: int) -> None:
        self.written.append(Recorded(name, data.encode() if isinstance(data, str) else data))
        if len(self.written[-1].data) != size:
            raise ValueError(f"torch wrote {name} in an unknown way")
        if name == _LAST:
            raise _Complete


def _pickled(
    state: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _disable_byteorder_record: bool = False,
    _use_new_zipfile_serialization: bool = True,
) -> tuple[list[Recorded], list[torch.UntypedStorage]]:
    """Return the records that torch writes before the storages, and the storages by key."""
    storages: dict[str, torch.UntypedStorage] = {}

    class Recorder(pickle_module.Pickler):  # type: ignore[misc]  # known at run time only
        """Base class of torch's pickler, whose persistent_id returns the key of each storage."""

        def __init_subclass__(cls) -> None:
            original = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                found = original(self, value)
                if found is not None:
                    typed = isinstance(value, torch.storage.TypedStorage)
                    storages[found[2]] = value._untyped_storage if typed else value
                return found

            cls.persistent_id = persistent_id

    module = types.SimpleNamespace(Pickler=Recorder, __name__=pickle_module.__name__)
    made = _Records()
    with suppress(_Complete):
        torch.serialization._save(state, made, module, pickle_protocol, False)
        raise ValueError(f"torch wrote no record {_LAST}")
    if list(storages) != [str(key) for key in range(len(storages))]:
        raise ValueError("torch numbered the storages in an unknown way")
    return made.written[: -1 if _disable_byteorder_record else None], list(storages.values())


@functools.cache
def is_like_stock() -> bool:
    """Return whether the images of two states are identical to the files of this torch version."""
    host = torch.device("cpu")  # the default device may be another
    some, none = torch.arange(9, device=host), torch.zeros(0, device=host)
    state = {"a": torch.arange(5.0, device=host), "b": [some[2:4], none], "c": 1}
    try:
        return all(_is_stocks(state, crc) for crc in (True, False))
    except (ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile):
        return False


def _is_stocks(state: Any, crc: bool) -> bool:
    stock = io.BytesIO()
    with crc32_setting(crc):
        torch.save(state, stock)
    described = _layout(STREAM, STREAM, state, crc, {})
    made = described.image(described.memories())
    return b"".join(view.tobytes() for view in made.views(0, made.size_bytes)) == stock.getvalue()


@contextmanager
def crc32_setting(enabled: bool) -> Iterator[None]:
    """Turn torch.save's CRC32 on or off inside the block. Other threads wait at the block."""
    with _settings_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(enabled)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


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
    source = ImageSource(FileImage.of("file", [sink.getvalue()]))
    found = ZipDirectory.read(source)
    last = list(range(len(names) + count, len(found.names)))
    records = []
    for number, start in zip(last, found.data_starts(source, last), strict=True):
        source.seek(start)
        name = found.names[number].partition("/")[2]
        records.append(Recorded(name, source.read(found.sizes[number])))
    return tuple(records)
