"""torch files: the stock `torch.save` zip, written from where its tensors lie, read in parallel."""

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
"""What zipfile and torch.load raise for damaged files, found by damaging some thousands."""

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
    """`torch.save(state, target/path, **options)` through `writer`, which says what is durable.

    The file is stock torch's, byte for byte. Storages go to `writer` as they lie in memory, their
    CRC32 computed before by several threads; `crc=False` leaves it out of the zip (torch does not
    check it on load). Where storages are neither in host nor in CUDA memory, or `torch_image` has
    no image of the state for another reason, the file is streamed instead, durable always, torch
    computing the CRC32 at about 1.5 GiB/s; its archive is then called `archive`, as that of any
    stream. The phase `serialize` is what came before the first byte was written.
    Raises TransferError; what pickling raises is passed on. Nothing is published then.
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
                raise stream.failure from error  # torch reports its own end of file instead
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
    """The object in the torch file `target/path` without its data, and the image that fills it.

    torch unpickles the object alone (`torch.serialization.skip_data`); its storages lie as in the
    file in one piece of memory, which direct reads fill without a copy; see `FileMemory`. With
    `allocate` they get memory from there, one call each in the order of their keys (none for empty
    ones). `writer` opens the file, to look at it; without one it must be a file of a mounted file
    system. Without `allocate` everything is on the CPU. Raises DataMismatchError for a file that is
    no stock torch zip or is damaged, TransferError. What torch refuses to unpickle with
    `weights_only` is passed on (pickle.UnpicklingError). Trusts the file to number
    storages in the order of the pickle, as torch.save does; their sizes are compared, their
    contents are a manifest's checksums to prove.
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
    """The object, the storage of each record being `take(start, stop)`, empty ones on `device`."""
    left = iter(records)

    def place(storage: Any, location: str) -> Any:  # noqa: ARG001 -- wherever it was
        if not storage.nbytes():  # torch asks again for each tensor on an empty storage
            return storage if device is None else torch.empty(0, device=device).untyped_storage()
        start, stop = next(left, (0, 0))
        if storage.nbytes() != stop - start:
            raise other
        return flat_tensor(take(start, stop)).untyped_storage()

    other = DataMismatchError(f"{file}: its storages are not in the order that torch.save writes")
    with torch.serialization.skip_data(), _damage(file, source):
        source.seek(0)
        state = torch.load(cast(IO[bytes], source), map_location=place, weights_only=weights_only)
    if any(left):
        raise other
    return state


@contextmanager
def _damage(file: str, source: Source) -> Iterator[None]:
    """What torch raises on a damaged file, as DataMismatchError; a refusal to unpickle as it is."""
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
    """Restore the torch file `target/path`: the object, and what the read took.

    One read of the whole file over the writer's path fills all storages, which are on `device`
    ("cpu", "cuda", "cuda:1") wherever they were saved from; see `prepare` for `allocate`, which
    takes the place of `device`. Raises what `prepare` does, and DataMismatchError for a file that
    was replaced after it was looked at.
    """
    file, allocate = os.path.join(target, path), allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        state, image = _prepare(path, file, source, allocate, weights_only)
    moved = writer.read(image, target)
    source.check(file, image)
    return state, moved


def view(memory: Bytes, where: str) -> Any:
    """The object in a torch zip that is in `memory`, its storages being that memory: no copy.

    `where` names it in errors. The storages lie as they do in the zip, so at any address: copy from
    them, and do not compute on them. Only what `weights_only` admits. Raises DataMismatchError.
    """
    source = ImageSource(FileImage.of("file", [memory]))
    records, _ = storage_places(where, source)
    return _unpickled(where, source, records, lambda a, b: memory[a:b], weights_only=True)


def storage_places(file: str, opened: Source) -> tuple[list[tuple[int, int]], int]:
    """([start, stop) of each storage that has bytes, by key; the file's size in bytes).

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
        raise DataMismatchError(f"{file}: no torch zip file ({error})") from error


def _storages(opened: Source, size: int) -> list[tuple[int, int]]:
    """Raises one of _DAMAGE for a file that stock torch did not write on a machine like this."""
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
            raise zipfile.BadZipFile("its storages overlap, or lie beyond its end")
        end = stop
    return places


def _data_starts(opened: Source, header_offsets: list[int]) -> list[int]:
    """Where the records' data begin: their local headers' names and padding are stepped over."""
    return [
        offset
        + _LOCAL_HEADER
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
        for offset, header in zip(
            header_offsets, opened.read_at(header_offsets, _LOCAL_HEADER), strict=True
        )
    ]
