"""The files of an export: their names, and the order of text and tensors in each.

bytes_of: the bytes of a tensor in the dtype of the export.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from iobench.checkpoint.ranked.structure import StatePath
from iobench.errors import UnavailableError, UsageError
from iobench.exports.source import ExportSource, StoredValue
from iobench.formats import torch_image
from iobench.formats.dcp_file import DcpFile, DcpItem
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensors import tensor_bytes, tensor_from_bytes, torch_dtype
from iobench.formats.torch_file import DAMAGE
from iobench.verification import dcp
from iobench.verification.inventory import ListedTensor
from iobench.workloads.layouts.huggingface import split_shards
from iobench.workloads.layouts.layout import shard_index
from iobench.workloads.specs import TensorSpec
from iobench.writers.image import Bytes, FileImage

ExportFormat = Literal["safetensors", "torch", "dcp"]

_INDEX = "model.safetensors.index.json"
_CONVERTED = {"float64", "float32", "float16", "bfloat16"}


class ExportTensor(NamedTuple):
    """A tensor to write once, under the first of its names; the others are tied to it."""

    names: tuple[str, ...]
    paths: tuple[StatePath, ...]
    source: ListedTensor
    dtype: str

    @property
    def size_bytes(self) -> int:
        return prod(self.source.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ExportFile:
    """A file. `streamed` yields it in order: text, and each of `tensors` in place of its bytes.

    The function that it takes returns the CRC32 of these bytes afterwards. Call it once.
    """

    path: str
    size_bytes: int
    tensors: Sequence[ExportTensor]
    streamed: Callable[[Callable[[], int]], Iterable[Bytes | ExportTensor]] = field(repr=False)
    items: Sequence[DcpItem] = field(default=(), repr=False)
    values: Mapping[str, tuple[int, StoredValue]] = field(default_factory=dict, repr=False)
    """Offsets in the file of DCP's plain values."""


def tensors_of(source: ExportSource, dtype: str | None) -> list[ExportTensor]:
    """Return what to write. `dtype`, if given, is that of tensors of 2, 4 and 8 byte floats."""
    same: dict[object, ExportTensor] = {}
    for name, (path, tensor) in source.tensors.items():
        empty = not prod(tensor.shape)
        key = name if empty else (tensor.dtype, tensor.shape, tensor.parts)
        known = same.get(key)
        if known is not None:
            same[key] = known._replace(names=(*known.names, name), paths=(*known.paths, path))
        else:
            kind = dtype if dtype and tensor.dtype in _CONVERTED else tensor.dtype
            same[key] = ExportTensor((name,), (path,), tensor, kind)
    return list(same.values())


def bytes_of(tensor: ExportTensor, pieces: Iterator[tuple[int, Iterator[Any]]]) -> Iterator[Bytes]:
    """Yield the bytes of the next tensor of grouped `pieces`, in its new dtype."""
    if not tensor.size_bytes:
        return
    kind, target = torch_dtype(tensor.source.dtype), torch_dtype(tensor.dtype)
    for _, data in next(pieces)[1]:
        if kind == target:
            yield data
            continue
        aligned = data.copy() if data.ctypes.data % kind.itemsize else data
        values = tensor_from_bytes(aligned, kind, (len(data) // kind.itemsize,))
        made = values.to(target)
        if target == torch.float16 and bool((made.isinf() & values.isfinite()).any()):
            raise UsageError(f"{tensor.names[0]}: has values too large for fp16; choose bf16")
        yield tensor_bytes(made)


def files_of(
    format_: ExportFormat,
    name: str,
    tensors: Sequence[ExportTensor],
    values: Mapping[str, StoredValue],
    max_shard_bytes: int,
) -> list[ExportFile]:
    """Return the files; `name` is that of a torch file. Raises UsageError, UnavailableError."""
    if format_ == "torch":
        return [_torch_file(name, tensors, values)]
    by_name = {tensor.names[0]: tensor for tensor in tensors}
    specs = [TensorSpec(name=t.names[0], dtype=t.dtype, shape=t.source.shape) for t in tensors]
    shards = [
        [by_name[one.name] for one in shard] for shard in split_shards(specs, max_shard_bytes)
    ]
    if format_ == "dcp":
        return [
            _dcp_file(f"__{number}_0{dcp.DATA}", shard, {} if number else values)
            for number, shard in enumerate(shards)
        ]
    if len(shards) == 1:
        return [_safetensors_file("model.safetensors", shards[0])]
    return [
        _safetensors_file(f"model-{number:05}-of-{len(shards):05}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    ]


def index_of(format_: ExportFormat, files: Sequence[ExportFile]) -> list[FileImage]:
    """Return the small files that describe the others."""
    if format_ == "dcp":
        return [FileImage.of(dcp.METADATA, [_dcp_metadata(files)])]
    if format_ == "torch" or len(files) == 1:
        return []
    listed = [(tensor, file.path) for file in files for tensor in file.tensors]
    index = shard_index(
        sum(prod(tensor.source.shape) for tensor, _ in listed),
        sum(tensor.size_bytes for tensor, _ in listed),
        {tensor.names[0]: path for tensor, path in listed},
    )
    return [FileImage.of(_INDEX, [index])]


def _safetensors_file(path: str, tensors: Sequence[ExportTensor]) -> ExportFile:
    """Ties are in the metadata of the file, like those of safetensors.torch.save_model."""
    ties = {tied: tensor.names[0] for tensor in tensors for tied in tensor.names[1:]}
    described = [(one.names[0], one.dtype, one.source.shape) for one in tensors]
    try:
        header, sizes = header_bytes(described, {**ties, "format": "pt"})
    except ValueError as error:
        raise UsageError(f"{error}; --dtype converts floats, --format dcp keeps all") from error
    by_name = {tensor.names[0]: tensor for tensor in tensors}
    ordered = [by_name[name] for name in sizes]

    def streamed(_: Callable[[], int]) -> Iterable[Bytes | ExportTensor]:
        return [np.frombuffer(header, dtype=np.uint8), *ordered]

    size = len(header) + sum(sizes.values())
    return ExportFile(path=path, size_bytes=size, tensors=ordered, streamed=streamed)


def _torch_file(
    path: str, tensors: Sequence[ExportTensor], values: Mapping[str, StoredValue]
) -> ExportFile:
    flat: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    of_storage: dict[int, ExportTensor] = {}
    for tensor in tensors:
        # Its memory has no pages, and never gets any.
        memory = torch.UntypedStorage(tensor.size_bytes, device="cpu")
        of_storage[memory.data_ptr()] = tensor
        made = torch.empty(0, dtype=torch_dtype(tensor.dtype), device="cpu").set_(memory)
        made = made.view(tensor.source.shape)
        flat |= dict.fromkeys(tensor.names, made)
        paths |= dict(zip(tensor.names, tensor.paths, strict=True))
    for name, value in values.items():
        flat[name], paths[name] = _loaded(value), value.path
    layout = torch_image.layout(path, unflatten_state_dict(flat, paths))
    if layout is None:
        raise UnavailableError(
            "a torch file",
            f"the layout of files of torch {torch.__version__} is unknown to this iobench.",
            "Use torch 2.13, or --format safetensors.",
        )
    at_offset = {
        start: of_storage[storage.data_ptr()] for start, storage in layout.storages.items()
    }

    def streamed(checksum: Callable[[], int]) -> Iterable[Bytes | ExportTensor]:
        for part in layout.streamed(checksum):
            yield at_offset[part] if isinstance(part, int) else part

    return ExportFile(
        path=path,
        size_bytes=layout.size_bytes,
        tensors=list(at_offset.values()),
        streamed=streamed,
    )


def readable_values(values: Mapping[str, StoredValue]) -> dict[str, StoredValue]:
    """Return the values that torch.load admits with `weights_only`."""
    found = {}
    for name, value in values.items():
        with suppress(*DAMAGE, pickle.UnpicklingError):
            _loaded(value)
            found[name] = value
    return found


def _loaded(value: StoredValue) -> Any:
    return torch.load(io.BytesIO(value.saved), weights_only=True)


def _dcp_file(
    path: str, tensors: Sequence[ExportTensor], values: Mapping[str, StoredValue]
) -> ExportFile:
    file = DcpFile([(torch_dtype(one.dtype), one.source.shape) for one in tensors])
    size, placed = file.size_bytes, {}
    for name, value in values.items():
        placed[name] = size, value
        size += len(value.saved)

    def streamed(checksum: Callable[[], int]) -> Iterable[Bytes | ExportTensor]:
        for part in file.streamed(checksum):
            yield tensors[part] if isinstance(part, int) else part
        for value in values.values():
            yield np.frombuffer(value.saved, dtype=np.uint8)

    return ExportFile(
        path=path,
        size_bytes=size,
        tensors=tensors,
        streamed=streamed,
        items=file.items,
        values=placed,
    )


def _dcp_metadata(files: Sequence[ExportFile]) -> bytes:
    """Return the file `.metadata`; tied tensors are one item of several names."""
    found: dict[str, Any] = {}
    storage: dict[stock.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, StatePath] = {}
    for file in files:
        for tensor, item in zip(file.tensors, file.items, strict=True):
            shape = torch.Size(tensor.source.shape)
            offsets = torch.Size([0] * len(shape))
            described = stock.TensorStorageMetadata(
                properties=stock.TensorProperties(dtype=torch_dtype(tensor.dtype)),
                size=shape,
                chunks=[stock.ChunkStorageMetadata(offsets=offsets, sizes=shape)],
            )
            for name, path in zip(tensor.names, tensor.paths, strict=True):
                found[name], paths[name] = described, path
                place = _StorageInfo(file.path, item.start, item.length)
                storage[stock.MetadataIndex(name, offsets)] = place
        for name, (start, value) in file.values.items():
            found[name], paths[name] = stock.BytesStorageMetadata(), value.path
            place = _StorageInfo(file.path, start, len(value.saved))
            storage[stock.MetadataIndex(name)] = place
    return pickle.dumps(
        stock.Metadata(
            state_dict_metadata=found,
            planner_data=paths,
            storage_data=storage,
            storage_meta=stock.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )
