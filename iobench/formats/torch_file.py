"""torch files: the stock `torch.save` zip, streamed through a writer, read back in parallel."""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.formats.tensors import Allocate, allocate
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.source import LocalSource, Source
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare", "save"]

_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(AssertionError, zipfile.BadZipFile, struct.error),
)
"""What zipfile and torch.load raise for damaged files, found by damaging some thousands."""

_LOCAL_HEADER = 30  # bytes before name and extra field, APPNOTE 4.3.7
_torch_settings = threading.RLock()
"""Guards torch's process-wide serialization settings while they differ from the caller's."""


def save(
    state: Any,
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    crc: bool = True,
    size_hint: int | None = None,
) -> Transfer:
    """`torch.save(state)` to `target/path` through `writer`; durable on return.

    The file is what stock torch writes and `torch.load` reads. `crc=False` leaves out the zip's
    CRC32 (torch does not check it on load), which one core computes at about 1.5 GiB/s. `size_hint`
    is the expected file size in bytes, for reserving space. Raises TransferError; what pickling
    raises is passed on. Nothing is published then.
    """
    stream = writer.open(os.path.join(target, path), size_hint)
    with stream:
        try:
            with _crc32(crc):
                torch.save(state, cast(IO[bytes], stream))
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
    allocate: Allocate = allocate,
    weights_only: bool = True,
) -> tuple[Any, FileImage]:
    """The object in the torch file `target/path` without its data, and the image that fills it.

    torch unpickles the object alone (`torch.serialization.skip_data`); its storages get memory from
    `allocate`, one call each in the order of their keys (none for empty ones), and are the image's
    segments. `writer` opens the file, to look at it; without one it must be a file of a mounted
    file system. Everything is on the CPU. Raises DataMismatchError for a file that is no stock
    torch zip or is damaged, TransferError. What torch refuses to unpickle with `weights_only` is
    passed on (pickle.UnpicklingError). Trusts the file to number storages in the order of the
    pickle, as torch.save does; their sizes are compared, their contents are a manifest's checksums
    to prove.
    """
    file = os.path.join(target, path)
    with _opened(file, writer) as source:
        return _prepare(path, file, source, allocate, weights_only)


def _prepare(
    path: str, file: str, source: Source, allocate: Allocate, weights_only: bool
) -> tuple[Any, FileImage]:
    records, size = _records(file, source)
    memories: list[Bytes] = []

    def place(storage: Any, location: str) -> Any:  # noqa: ARG001 -- everything goes to the CPU
        if not storage.nbytes():  # torch asks again for each tensor on an empty storage
            return storage
        memory = allocate(storage.nbytes())
        memories.append(memory)
        return torch.from_numpy(memory).untyped_storage()

    with torch.serialization.skip_data(), _damage(file):
        source.seek(0)
        state = torch.load(cast(IO[bytes], source), map_location=place, weights_only=weights_only)
    if [len(memory) for memory in memories] != [stop - start for start, stop in records]:
        raise DataMismatchError(f"{file}: its storages are not in the order that torch.save writes")
    return state, _image(path, records, memories, size)


@contextmanager
def _damage(file: str) -> Iterator[None]:
    """What torch raises on a damaged file, as DataMismatchError; a refusal to unpickle as it is."""
    try:
        yield
    except (IobenchError, pickle.UnpicklingError):
        raise
    except _DAMAGE as error:
        first_line = str(error).partition("\n")[0]
        raise DataMismatchError(
            f"{file}: torch cannot read it ({type(error).__name__}: {first_line})"
        ) from error


def load(
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    allocate: Allocate = allocate,
    weights_only: bool = True,
) -> tuple[Any, Transfer]:
    """Restore the torch file `target/path`: the object, and what the read took.

    One read of the whole file over the writer's path fills all storages; see `prepare`.
    """
    state, image = prepare(path, target, writer, allocate=allocate, weights_only=weights_only)
    return state, writer.read(image, target)


def _image(
    path: str, records: list[tuple[int, int]], memories: list[Bytes], size: int
) -> FileImage:
    """The whole file: storages where they stand, scratch memory for what lies between."""
    parts: list[Any] = []
    position = 0
    for (start, stop), memory in sorted(zip(records, memories, strict=True), key=lambda x: x[0]):
        parts += [bytearray(start - position), memory]
        position = stop
    return FileImage.of(path, [*parts, bytearray(size - position)])


@contextmanager
def _opened(file: str, writer: Writer | None) -> Iterator[Source]:
    try:
        source: Source = LocalSource(file) if writer is None else writer.open_source(file)
    except IobenchError:
        raise
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error
    with closing(source):
        yield source


def _records(file: str, opened: Source) -> tuple[list[tuple[int, int]], int]:
    """([start, stop) of each storage that has bytes, by key; the file's size in bytes)."""
    try:
        size = opened.seek(0, io.SEEK_END)
        return _storages(opened, size), size
    except IobenchError:
        raise
    except _DAMAGE as error:
        raise DataMismatchError(f"{file}: no torch zip file ({error})") from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a seek to where a damaged directory points
            raise DataMismatchError(f"{file}: no torch zip file ({error})") from error
        raise TransferError.wrap(error, "opening", file) from error


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


@contextmanager
def _crc32(enabled: bool) -> Iterator[None]:
    """torch.save with or without CRC32 inside, and as before outside."""
    with _torch_settings:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(enabled)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
