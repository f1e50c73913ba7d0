"""torch files: the stock `torch.save` zip, written without copying tensors, read in parallel."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch

from iobench.errors import DataMismatchError, IobenchError
from iobench.formats import torch_image
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.formats.tensors import Allocate, OnDevice, allocate_on, flat_tensor
from iobench.formats.torch_settings import crc32_setting
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage, Memory
from iobench.writers.source import ImageSource, Source
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare", "save", "storage_places", "view"]

_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(AssertionError, zipfile.BadZipFile, struct.error),
)
"""Exceptions of zipfile and torch.load for damaged files, found by damaging thousands of files."""

_WIDEST = 16  # bytes of the widest value, complex128; torch.save puts storages at multiples of 64
_LOCAL_HEADER = 30  # bytes before name and extra field, APPNOTE 4.3.7


def save(
    state: Any,
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    crc: bool = True,
    durable: bool = True,
    sync_directory: bool = True,
    **options: Any,
) -> Transfer:
    """`torch.save(state, target/path, **options)` through `writer`; see `Writer.write`.

    The file is identical to stock torch's. The storages are not copied, and their CRC32s are
    computed while `writer` reads them. `crc=False` leaves the CRC32 out of the zip; torch does not
    check it on load. `torch_image` has no image of some states, such as storages outside host and
    CUDA memory. Their file is streamed: it is always durable, torch computes the CRC32 at about
    1.5 GiB/s, and its zip folder is named `archive`, like that of every stream. The phase
    `serialize` is the time before the first byte is written.

    Raises TransferError, and passes on what pickling raises. Then nothing is published.
    """
    began = time.perf_counter()
    described = torch_image.image(path, state, target, crc=crc, **options)
    if described is None:
        return _stream(state, os.path.join(target, path), writer, crc, options)
    serialize_s = time.perf_counter() - began
    written = writer.write(described, target, durable=durable, sync_directory=sync_directory)
    return replace(
        written,
        elapsed_s=written.elapsed_s + serialize_s,
        phases_s={"serialize": serialize_s, **written.phases_s},
    )


def _stream(state: Any, file: str, writer: Writer, crc: bool, options: dict[str, Any]) -> Transfer:
    stream = writer.open(file)
    with stream:
        try:
            with crc32_setting(crc):
                torch.save(state, cast(IO[bytes], stream), **options)
        except Exception as error:
            if stream.failure is not None and stream.failure is not error:
                raise stream.failure from error  # torch hides it behind an error of its own
            raise
    assert stream.transfer is not None
    return stream.transfer


def prepare(
    path: str,
    target: str | Path,
    writer: Writer | None = None,
    *,
    allocate: Allocate | None = None,
    weights_only: bool = True,
) -> tuple[Any, FileImage]:
    """Return the object in the torch file `target/path` without data, and the image that fills it.

    torch unpickles only the object (`torch.serialization.skip_data`). Its storages share one piece
    of memory in the layout of the file, which direct reads fill without a copy; see `FileMemory`.
    With `allocate`, each storage's memory comes from one call of it, in the order of the keys;
    empty storages need none. Without it everything is on the CPU. `writer` opens the file to
    inspect it; without a writer the file must be in a mounted file system.

    Raises DataMismatchError for a file that is damaged or not a stock torch zip, and TransferError.
    With `weights_only`, passes on pickle.UnpicklingError for what torch refuses to unpickle. The
    file must number its storages in the order of the pickle, like torch.save. Only the sizes of the
    storages are compared here; checksums of a manifest must prove their contents.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _prepare(path, file, source, allocate, weights_only)


def _prepare(
    path: str, file: str, source: Source, allocate: Allocate | None, weights_only: bool
) -> tuple[Any, FileImage]:
    records, size = storage_places(file, source)
    memory = FileMemory(file, size, allocate)
    state = _unpickled(
        *(file, source, records, lambda start, stop: memory.take(start, stop, _WIDEST)),
        weights_only=weights_only,
        device=allocate.device if isinstance(allocate, OnDevice) else None,
    )
    return state, memory.image(path)


def _unpickled(
    file: str,
    source: Source,
    records: list[tuple[int, int]],
    take: Callable[[int, int], Memory],
    *,
    weights_only: bool,
    device: torch.device | None = None,
) -> Any:
    """Return the object. `take(start, stop)` gives each storage; empty ones are on `device`."""
    left = iter(records)

    def place(storage: Any, location: str) -> Any:  # noqa: ARG001 -- wherever it was
        if not storage.nbytes():  # torch calls this once per tensor on an empty storage
            return storage if device is None else torch.empty(0, device=device).untyped_storage()
        start, stop = next(left, (0, 0))
        if storage.nbytes() != stop - start:
            raise other
        return flat_tensor(take(start, stop)).untyped_storage()

    other = DataMismatchError(f"{file}: its storages are not in the order of torch.save")
    with torch.serialization.skip_data(), _damage(file, source):
        source.seek(0)
        state = torch.load(cast(IO[bytes], source), map_location=place, weights_only=weights_only)
    if any(left):
        raise other
    return state


@contextmanager
def _damage(file: str, source: Source) -> Iterator[None]:
    """Turn torch's errors for a damaged file into DataMismatchError; pass on UnpicklingError."""
    try:
        yield
    except Exception as error:
        if isinstance(source, InspectedFile):
            source.raise_failure(file)
        other = isinstance(error, IobenchError | pickle.UnpicklingError)
        if other or not isinstance(error, (*_DAMAGE, OSError)):
            raise
        first_line = str(error).partition("\n")[0]
        raise DataMismatchError(
            f"{file}: torch cannot read it ({type(error).__name__}: {first_line})"
        ) from error


def load(
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
    weights_only: bool = True,
) -> tuple[Any, Transfer]:
    """Restore the torch file `target/path`. Return the object and the Transfer.

    One read of the whole file through the writer's path fills all storages. They are on `device`
    ("cpu", "cuda", "cuda:1"), whatever device they were saved from. `allocate` replaces `device`;
    see `prepare`. Raises what `prepare` raises, and DataMismatchError for a file that was replaced
    after its inspection.
    """
    file, allocate = os.path.join(target, path), allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        state, image = _prepare(path, file, source, allocate, weights_only)
    moved = writer.read(image, target)
    source.check(file, image)
    return state, moved


def view(memory: Bytes, where: str) -> Any:
    """Return the object of the torch zip in `memory`. Its storages are views of `memory`.

    `where` names the zip in errors. The storages are not aligned: copy from them, and do not
    compute on them. Unpickles only what `weights_only` allows. Raises DataMismatchError.
    """
    source = ImageSource(FileImage.of("file", [memory]))
    records, _ = storage_places(where, source)
    return _unpickled(where, source, records, lambda a, b: memory[a:b], weights_only=True)


def storage_places(file: str, opened: Source) -> tuple[list[tuple[int, int]], int]:
    """Return ([start, stop) of each non-empty storage in key order, the file's size in bytes).

    `opened` is the torch zip, `file` names it in errors. Raises DataMismatchError, TransferError.
    """
    try:
        size = opened.seek(0, io.SEEK_END)
        return _storages(opened, size), size
    except IobenchError:
        raise
    except (*_DAMAGE, OSError) as error:  # EINVAL: a seek to where a damaged directory points
        if isinstance(opened, InspectedFile):
            opened.raise_failure(file)
        raise DataMismatchError(f"{file}: not a torch zip file ({error})") from error


def _storages(opened: Source, size: int) -> list[tuple[int, int]]:
    """Return the ranges of the storages. Raises one of _DAMAGE for any file but stock torch's.

    A file of the other byte order is refused too.
    """
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(cast(IO[bytes], opened)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        folder = next((n.removesuffix("/data.pkl") for n in entries if n.endswith("/data.pkl")), "")
        if not folder or f"{folder}/version" not in entries:
            raise zipfile.BadZipFile("its records are not those of torch.save")
        if f"{folder}/constants.pkl" in entries:
            raise zipfile.BadZipFile("it is a TorchScript archive")
        if order := entries.get(f"{folder}/byteorder"):
            (start,) = _data_starts(opened, [order.header_offset])
            opened.seek(start)
            byteorder = opened.read(min(order.file_size, 16))
            if byteorder != sys.byteorder.encode():
                raise zipfile.BadZipFile(f"byte order {byteorder!r} is not this machine's")
        data = {
            key: entry
            for name, entry in entries.items()
            if (key := name.removeprefix(f"{folder}/data/")) != name and key.isdigit()
        }
        for entry in data.values():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"record {entry.filename} is compressed")
        starts = _data_starts(opened, [entry.header_offset for entry in data.values()])
        for (key, entry), start in zip(data.items(), starts, strict=True):
            found[int(key)] = (start, start + entry.file_size)
    if sorted(found) != list(range(len(found))):
        raise zipfile.BadZipFile(f"storages {sorted(found)[:5]}... are not numbered from 0")
    places = [found[key] for key in range(len(found)) if found[key][0] < found[key][1]]
    end = 0
    for start, stop in sorted(places):
        if start < end or stop > size:
            raise zipfile.BadZipFile("its storages overlap or exceed the file")
        end = stop
    return places


def _data_starts(opened: Source, header_offsets: list[int]) -> list[int]:
    """Return the offset of each record's data: after the local header, its name and its padding."""
    return [
        offset
        + _LOCAL_HEADER
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
        for offset, header in zip(
            header_offsets, opened.read_at(header_offsets, _LOCAL_HEADER), strict=True
        )
    ]
