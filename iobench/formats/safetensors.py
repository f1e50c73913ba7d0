"""safetensors files: described as file images, so that no payload is copied on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.formats.safetensors_header import DTYPES, header_bytes
from iobench.formats.tensors import (
    Allocate,
    allocate,
    dtype_name,
    tensor_bytes,
    tensor_from_bytes,
    torch_dtype,
)
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
    """The image of a safetensors file of `tensors` (CPU), identical to the library's file.

    The image's memory is the tensors' own: they must stay as they are while it is written. Tensors
    that are not contiguous are copied here. Raises UsageError for what safetensors cannot hold.
    """
    described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    try:
        header, places = header_bytes(described, metadata)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return FileImage.of(path, [header, *(tensor_bytes(tensors[name]) for name in places)])


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


def read_header(file: str | Path) -> tuple[dict[str, Any], int]:
    """(the header's JSON, bytes before the data section). Raises DataMismatchError."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error
    try:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER, os.fstat(fd).st_size - 8):
            raise DataMismatchError(f"{file}: no safetensors file (header length {length})")
        document = json.loads(os.pread(fd, length, 8))
    except ValueError as error:
        raise DataMismatchError(f"{file}: no safetensors file ({error})") from error
    finally:
        os.close(fd)
    if not isinstance(document, dict):
        raise DataMismatchError(f"{file}: no safetensors file (the header is no object)")
    return document, 8 + length


def prepare(
    path: str, target: str | Path, *, allocate: Allocate = allocate
) -> tuple[dict[str, torch.Tensor], FileImage]:
    """The tensors of the file `target/path`, still empty, and the image that fills them.

    Every tensor has memory of its own from `allocate`, one call each in file order; nothing is
    mapped. Raises DataMismatchError for a damaged file, TransferError.
    """
    document, data_start = read_header(os.path.join(target, path))
    document.pop("__metadata__", None)
    memories: list[Any] = [bytearray(data_start)]
    tensors: dict[str, torch.Tensor] = {}
    expected = 0
    for name, entry in sorted(document.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != expected or entry["dtype"] not in _TORCH_NAMES:
            raise DataMismatchError(f"{path}: tensor {name!r} is out of place or of unknown dtype")
        expected = end
        memory = allocate(end - begin)
        memories.append(memory)
        tensors[name] = _tensor(path, name, entry, memory)
    return tensors, FileImage.of(path, memories)


def load(
    path: str, target: str | Path, writer: Writer, *, allocate: Allocate = allocate
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Restore the safetensors file `target/path`: its tensors by name, and what the read took.

    All bytes come from storage before this returns; see `prepare`.
    """
    tensors, image = prepare(path, target, allocate=allocate)
    return tensors, writer.read(image, target)


def _tensor(path: str, name: str, entry: dict[str, Any], memory: Any) -> torch.Tensor:
    dtype = _TORCH_NAMES[entry["dtype"]]
    shape = tuple(entry["shape"])
    if dtype == _PACKED and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    try:
        return tensor_from_bytes(memory, torch_dtype(dtype), shape)
    except RuntimeError as error:
        raise DataMismatchError(
            f"{path}: tensor {name!r} has {len(memory)} bytes, not what {dtype} {shape} needs"
        ) from error


def index_bytes(shards: Mapping[str, list[str]], total_size_bytes: int) -> bytes:
    """`model.safetensors.index.json` for file -> tensor names, as transformers writes it."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    document = {
        "metadata": {"total_size": total_size_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
