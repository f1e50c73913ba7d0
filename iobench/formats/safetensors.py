"""safetensors files: described as file images, so that no payload is copied on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError, UsageError
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.formats.safetensors_header import DTYPES, header_bytes
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

__all__ = ["image", "index_bytes", "load", "prepare", "read_header", "save"]

_TORCH_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
_PACKED = "float4_e2m1fn_x2"


def image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileImage:
    """The image of a safetensors file of `tensors` (CPU or CUDA), identical to the library's file.

    The image's memory is the tensors' own: they must stay as they are while it is written. Tensors
    that are not contiguous are copied here. Raises UsageError for what safetensors cannot hold.
    """
    described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    try:
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


def read_header(file: str | Path, writer: Writer | None = None) -> tuple[dict[str, Any], int, int]:
    """(the header's JSON, bytes before the data section, bytes of the file).

    `writer` opens the file where it is none of a mounted file system. Raises DataMismatchError.
    """
    with InspectedFile.opened(os.fspath(file), writer) as source:
        return _header(file, source)


def _header(file: str | Path, source: InspectedFile) -> tuple[dict[str, Any], int, int]:
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        length = int.from_bytes(source.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise DataMismatchError(f"{file}: no safetensors file (header length {length})")
        document = parse_json(source.read(length))
    except IobenchError:
        raise
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error
    except (ValueError, RecursionError) as error:
        raise DataMismatchError(f"{file}: no safetensors file ({error})") from error
    if not isinstance(document, dict):
        raise DataMismatchError(f"{file}: no safetensors file (the header is no object)")
    return document, 8 + length, size


def prepare(
    path: str,
    target: str | Path,
    writer: Writer | None = None,
    *,
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    """The tensors of the file `target/path`, still empty, and the image that fills them.

    The tensors lie as in the file in one piece of memory, which direct reads fill without a copy,
    yet each has a storage of its own; see `FileMemory`. With `allocate` every tensor gets memory
    from there, one call each in file order. Nothing of the file is mapped. `writer` opens it, to
    look at its header; without one it must be a file of a mounted file system. Raises
    DataMismatchError for a damaged file, TransferError.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _prepare(path, file, source, allocate)


def _prepare(
    path: str, file: str, source: InspectedFile, allocate: Allocate | None
) -> tuple[dict[str, torch.Tensor], FileImage]:
    document, data_start, size = _header(file, source)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DataMismatchError(f"{file}: __metadata__ must map strings to strings")
    places = sorted((_place(file, name, entry) for name, entry in document.items()), key=_position)
    _check_gapless(file, places, size - data_start)
    memory = FileMemory(file, size, allocate)
    tensors: dict[str, torch.Tensor] = {}
    for place in places:
        dtype = torch_dtype(place.dtype)
        begin, end = data_start + place.begin, data_start + place.end
        part = memory.take(begin, end, dtype.itemsize)
        try:
            tensors[place.name] = tensor_from_bytes(part, dtype, place.shape)
        except (TypeError, RuntimeError) as error:  # an empty one of 2^63 and the like
            raise DataMismatchError(
                f"{file}: tensor {place.name!r}: torch has no shape {list(place.shape)}"
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
    """Restore the safetensors file `target/path`: its tensors by name, and what the read took.

    All bytes come from storage before this returns, and are on `device` ("cpu", "cuda", "cuda:1");
    see `prepare` for `allocate`, which takes the place of `device`. Raises what `prepare` does, and
    DataMismatchError for a file that was replaced after its header was looked at.
    """
    file, allocate = os.path.join(target, path), allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        tensors, image = _prepare(path, file, source, allocate)
    moved = writer.read(image, target)
    source.check(file, image)
    return tensors, moved


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A tensor of the header, found sound: its torch shape and its bytes in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _position(place: _Place) -> tuple[int, int]:
    return place.begin, place.end


def _place(file: str, name: str, entry: Any) -> _Place:
    """Raises DataMismatchError for an entry that is not what the format says."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]} if (
            code in _TORCH_NAMES and all(map(_is_count, [*shape, begin, end]))
        ):
            dtype = _TORCH_NAMES[code]
        case _:
            raise DataMismatchError(
                f"{file}: tensor {name!r} has no dtype, shape and place that safetensors knows"
            )
    odd = 0
    if dtype == _PACKED and shape:
        pairs, odd = divmod(shape.pop(), 2)
        shape.append(pairs)
    if odd or end - begin != prod(shape) * DTYPES[dtype][1]:
        raise DataMismatchError(
            f"{file}: tensor {name!r} has {end - begin} bytes, not what {code} "
            f"{entry['shape']} needs"
        )
    return _Place(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_gapless(file: str, places: list[_Place], data_bytes: int) -> None:
    """The tensors follow one another without gaps from the data's first byte to its last."""
    expected = 0
    for place in places:
        if place.begin != expected:
            raise DataMismatchError(
                f"{file}: tensor {place.name!r} is out of place, at {place.begin} "
                f"and not {expected}"
            )
        expected = place.end
    if expected != data_bytes:
        raise DataMismatchError(
            f"{file}: has {data_bytes} bytes of data, its header describes {expected}"
        )


def index_bytes(shards: Mapping[str, list[str]], total_size_bytes: int) -> bytes:
    """`model.safetensors.index.json` for file -> tensor names, as transformers writes it."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    document = {
        "metadata": {"total_size": total_size_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
