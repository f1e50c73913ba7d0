"""safetensors files as file images: saves and restores copy no payload."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError, UsageError
from iobench.formats.collector import collector_paused
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.formats.safetensors_header import DTYPES, header_bytes
from iobench.formats.safetensors_layout import image_on_cpu
from iobench.formats.tensors import (
    Allocate,
    allocate_on,
    dtype_name,
    tensor_from_bytes,
    tensor_memory,
    torch_dtype,
)
from iobench.text import parse_json
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "prepare", "save"]

_CODES = {code: (name, item_bytes) for name, (code, item_bytes) in DTYPES.items()}
_INTEGERS = frozenset((int,))
_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
_PACKED = "F4"


def image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileImage:
    """Return the image of a safetensors file of `tensors` (CPU or CUDA).

    The file is identical to that of the safetensors library. The image shares the tensors' memory:
    they must not change during the write. Tensors that are not contiguous are copied here. Raises
    UsageError for names, dtypes and metadata that safetensors cannot hold.
    """
    try:
        on_cpu = image_on_cpu(path, tensors, metadata)
        if on_cpu is not None:
            return on_cpu
        described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
        header, places = header_bytes(described, metadata)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return FileImage.of(path, [header, *(tensor_memory(tensors[name]) for name in places)])


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write `tensors` to the safetensors file `target/path`; see `Writer.write` for durability."""
    return writer.write(
        image(path, tensors, metadata), target, durable=durable, sync_directory=sync_directory
    )


def _header(file: str | Path, source: InspectedFile) -> tuple[dict[str, Any], int, int]:
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        length = int.from_bytes(source.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise DataMismatchError(f"{file}: not a safetensors file (header length {length})")
        document = parse_json(source.read(length))
    except IobenchError:
        raise
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error
    except (ValueError, RecursionError) as error:
        raise DataMismatchError(f"{file}: not a safetensors file ({error})") from error
    if not isinstance(document, dict):
        raise DataMismatchError(f"{file}: not a safetensors file (the header is not an object)")
    return document, 8 + length, size


def prepare(
    path: str,
    target: str | Path,
    writer: Writer | None = None,
    *,
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    """Return the tensors of the file `target/path`, still empty, and the image that fills them.

    The tensors share one piece of memory in the layout of the file, which direct reads fill without
    a copy. Yet each has its own storage; see `FileMemory`. With `allocate`, each tensor's memory
    comes from one call of it, in file order. The file is not mapped. `writer` opens the file to
    read its header; without a writer the file must be in a mounted file system. Raises
    DataMismatchError for a damaged file, and TransferError.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _prepare(path, file, source, allocate)


def _prepare(
    path: str, file: str, source: InspectedFile, allocate: Allocate | None
) -> tuple[dict[str, torch.Tensor], FileImage]:
    with collector_paused():
        document, data_start, size = _header(file, source)
        metadata = document.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise DataMismatchError(f"{file}: __metadata__ must map strings to strings")
        places = [_place(file, name, entry) for name, entry in document.items()]
        places.sort(key=_POSITION)
        _check_gapless(file, places, size - data_start)
        memory = FileMemory(file, size, allocate)
        tensors: dict[str, torch.Tensor] = {}
        for place in places:
            begin, end, dtype = data_start + place.begin, data_start + place.end, place.dtype
            part = memory.take(begin, end, dtype.itemsize)
            try:
                tensors[place.name] = tensor_from_bytes(part, dtype, place.shape)
            except (
                TypeError,
                RuntimeError,
            ) as error:  # such as an empty tensor of shape [0, 2**63]
                raise DataMismatchError(
                    f"{file}: tensor {place.name!r}: torch refuses the shape {list(place.shape)}"
                ) from error
    return tensors, memory.image(path)


def load(
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Restore the safetensors file `target/path`. Return its tensors by name, and the Transfer.

    On return all bytes have come from storage and are on `device` ("cpu", "cuda", "cuda:1").
    `allocate` replaces `device`; see `prepare`. Raises what `prepare` raises, and DataMismatchError
    for a file that was replaced after its header was read.
    """
    file, allocate = os.path.join(target, path), allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        tensors, image = _prepare(path, file, source, allocate)
    moved = writer.read(image, target)
    source.check(file, image)
    return tensors, moved


class _Place(NamedTuple):
    """A checked tensor of the header: its bytes in the data section, its torch dtype and shape."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: Sequence[int]


_POSITION = itemgetter(0, 1)
_dtype = cache(torch_dtype)  # this torch may lack one


def _place(file: str, name: str, entry: Any) -> _Place:
    """Check one entry of the header. Raises DataMismatchError for one that breaks the format."""
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype, item_bytes = _CODES[code]
        # The type of a number too: JSON has 1.0, true and "1".
        sound = type(shape) is list and _INTEGERS.issuperset(map(type, (*shape, begin, end)))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or min((*shape, begin, end)) < 0:
        raise DataMismatchError(
            f"{file}: tensor {name!r} needs a dtype, shape and data_offsets of safetensors"
        )
    odd = 0
    if code == _PACKED and shape:
        pairs, odd = divmod(shape[-1], 2)
        shape = [*shape[:-1], pairs]
    if odd or end - begin != prod(shape) * item_bytes:
        raise DataMismatchError(
            f"{file}: tensor {name!r} has {end - begin} bytes, which is not the size of {code} "
            f"{entry['shape']}"
        )
    return _Place(begin, end, name, _dtype(dtype), shape)


def _check_gapless(file: str, places: list[_Place], data_bytes: int) -> None:
    """Raise DataMismatchError unless the tensors fill the data section without gaps."""
    expected = 0
    for place in places:
        if place.begin != expected:
            raise DataMismatchError(
                f"{file}: tensor {place.name!r} begins at {place.begin}, expected {expected}"
            )
        expected = place.end
    if expected != data_bytes:
        raise DataMismatchError(
            f"{file}: has {data_bytes} bytes of data, its header describes {expected}"
        )
