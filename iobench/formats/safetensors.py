"""safetensors files as file images: saves and restores copy no payload."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError, UsageError
from iobench.formats.collector import collector_paused
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import Inspectable, InspectedFile
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.safetensors_runs import Kind, runs_of
from iobench.formats.tensor_layouts import FileLayout, located_dense
from iobench.formats.tensors import (
    Allocate,
    allocate_on,
    dtype_name,
    tensor_from_bytes,
    tensor_memory,
)
from iobench.writers.config import WriterLike, writer_of
from iobench.writers.image import AnyMemory, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "prepare", "save"]

_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more


def image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileImage:
    """Return the image of a safetensors file of `tensors` (CPU or CUDA).

    The file is identical to that of the safetensors library. The image shares the tensors' memory:
    they must not change during the write. Tensors that are not contiguous are copied here. Raises
    UsageError for names, dtypes and metadata that safetensors cannot hold.
    """
    with collector_paused():
        return _image(path, tensors, metadata)


def _image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> FileImage:
    try:
        described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
        header, sizes = header_bytes(described, metadata)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    stored = [tensors[name] for name, size in sizes.items() if size]
    located = located_dense(stored)
    if located is None:
        return FileImage.of(path, [header, *map(tensor_memory, stored)])
    lengths = [size for size in sizes.values() if size]
    return FileLayout(header, lengths).image(path, located.addresses, {}, owners=located.owners)


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write `tensors` to the safetensors file `target/path`; see `Writer.write` for durability."""
    made = image(path, tensors, metadata)
    return writer_of(writer).write(made, target, durable=durable, sync_directory=sync_directory)


def read_header(path: str, target: str | Path, writer: Inspectable) -> tuple[bytes, int]:
    """Return the JSON of the header of `target/path`, and the size of the file.

    Raises what `prepare` raises for the file; the JSON is not parsed.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _header(file, source)


def _header(file: str | Path, source: InspectedFile) -> tuple[bytes, int]:
    """Return the JSON of the header, and the size of the file."""
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        length = int.from_bytes(source.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise DataMismatchError(f"{file}: not a safetensors file (header length {length})")
        return source.read(length), size
    except IobenchError:
        raise
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error


def prepare(
    path: str,
    target: str | Path,
    writer: Inspectable | None = None,
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
        return _prepare(path, file, *_header(file, source), allocate)


def _prepare(
    path: str,
    file: str,
    header: bytes,
    size: int,
    allocate: Allocate | None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    memory, start = FileMemory(file, size, allocate), 8 + len(header)
    with collector_paused():
        tensors: dict[str, torch.Tensor] = {}
        for run in runs_of(file, header, size - start, one_by_one=allocate is not None):
            part = memory.take(start + run.begin, start + run.end, run.unit)
            for begin, _, name, kind in run.entries:
                tensors[name] = _tensor(file, name, kind, part, begin - run.begin)
        return tensors, memory.image(path)


def _tensor(file: str, name: str, kind: Kind, part: AnyMemory, at: int) -> torch.Tensor:
    """Return the tensor at offset `at` of `part`. Raises DataMismatchError."""
    if kind.values is not None and isinstance(part, np.ndarray):
        # As `tensor_from_bytes` makes it, in less time.
        return torch.from_numpy(np.ndarray(kind.shape, kind.values, part, at))
    try:
        return tensor_from_bytes(part, kind.dtype, kind.shape, at)
    except (TypeError, RuntimeError) as error:  # an empty tensor of shape [0, 2**63]
        raise DataMismatchError(
            f"{file}: tensor {name!r}: torch refuses the shape {list(kind.shape)}"
        ) from error


def load(
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Restore the safetensors file `target/path`. Return its tensors by name, and the Transfer.

    On return all bytes have come from storage and are on `device` ("cpu", "cuda", "cuda:1").
    `allocate` replaces `device`; see `prepare`. Raises what `prepare` raises, and DataMismatchError
    for a file that was replaced after its header was read.
    """
    writer, file = writer_of(writer), os.path.join(target, path)
    allocate = allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        tensors, image = _prepare(path, file, *_header(file, source), allocate)
    moved = writer.read(image, target)
    source.check(file, image)
    return tensors, moved
