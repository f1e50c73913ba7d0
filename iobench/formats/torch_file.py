"""torch files: the stock `torch.save` zip, streamed through a writer, read back in parallel."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from iobench.errors import DataMismatchError, TransferError
from iobench.formats.tensors import Allocate, allocate
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare", "save"]

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
    *,
    allocate: Allocate = allocate,
    weights_only: bool = True,
) -> tuple[Any, FileImage]:
    """The object in the torch file `target/path` without its data, and the image that fills it.

    torch unpickles the object alone (`torch.serialization.skip_data`); its storages get memory from
    `allocate`, one call each in the order of their keys, and are the image's segments. Everything
    is on the CPU. Raises DataMismatchError for a file that is no stock torch zip, TransferError.
    """
    file = os.path.join(target, path)
    records, size = _records(file)
    memories: list[Bytes] = []

    def place(storage: Any, location: str) -> Any:  # noqa: ARG001 -- everything goes to the CPU
        memory = allocate(storage.nbytes())
        memories.append(memory)
        if not len(memory):
            return storage
        return torch.from_numpy(memory).untyped_storage()

    with _torch_settings, torch.serialization.skip_data():
        state = torch.load(file, map_location=place, weights_only=weights_only)
    if [len(memory) for memory in memories] != [stop - start for start, stop in records]:
        raise DataMismatchError(f"{file}: its storages are not in the order that torch.save writes")
    return state, _image(path, records, memories, size)


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
    state, image = prepare(path, target, allocate=allocate, weights_only=weights_only)
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


def _records(file: str) -> tuple[list[tuple[int, int]], int]:
    """([start, stop) of each storage in the file, by key; the file's size in bytes)."""
    try:
        with open(file, "rb") as opened, zipfile.ZipFile(opened) as archive:
            found: dict[int, tuple[int, int]] = {}
            for entry in archive.infolist():
                folder, _, key = entry.filename.rpartition("/")
                if folder.endswith("data") and folder.count("/") <= 1 and key.isdigit():
                    if entry.compress_type != zipfile.ZIP_STORED:
                        raise DataMismatchError(f"{file}: record {entry.filename} is compressed")
                    start = _data_start(opened, entry.header_offset)
                    found[int(key)] = (start, start + entry.file_size)
            size = opened.seek(0, io.SEEK_END)
    except zipfile.BadZipFile as error:
        raise DataMismatchError(f"{file}: no torch zip file ({error})") from error
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error
    if sorted(found) != list(range(len(found))):
        raise DataMismatchError(f"{file}: storages {sorted(found)[:5]}... are not numbered from 0")
    return [found[key] for key in range(len(found))], size


def _data_start(opened: io.BufferedReader, header_offset: int) -> int:
    """Where the record's data begins: its local header's name and padding are stepped over."""
    header = os.pread(opened.fileno(), _LOCAL_HEADER, header_offset)
    name, extra = header[26:28], header[28:30]
    return (
        header_offset
        + _LOCAL_HEADER
        + int.from_bytes(name, "little")
        + int.from_bytes(extra, "little")
    )


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
