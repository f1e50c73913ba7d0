"""Directories of torch's distributed checkpoints: `.metadata`, and items in files `*.distcp`."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from contextlib import closing
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from iobench.errors import DataMismatchError, TransferError
from iobench.formats.dcp_file import ALIGNMENT
from iobench.formats.tensor_layouts import reach_bytes
from iobench.formats.tensors import dtype_name
from iobench.formats.torch_file import DAMAGE, TorchIndex
from iobench.verification.inventory import (
    CachedSource,
    ListedTensor,
    Slice,
    TensorPart,
    VerifyInventory,
    unreadable,
)
from iobench.verification.tensor_files import REFUSED, Other, add_zip, tensors_of_zip

METADATA, DATA = ".metadata", ".distcp"

_DATACLASSES = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("TensorProperties", "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)


def _member(kind: Any, name: str) -> Any:
    """Return the member `name` of the only enum: Python 3.11.0 to 3.11.3 pickle it by getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it gets {name!r} of {kind!r}, which is no part of metadata")
    return kind[name]


_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _DATACLASSES},
    (_BEFORE_2_3, "TensorProperties"): metadata.TensorProperties,
    (_BEFORE_2_3, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")  # the other one in Python 3.13
        for name in ("PosixPath", "Path")
    },
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}
"""What a `.metadata` consists of, and nothing that could run code."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module.startswith("megatron."):
            return Other
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")


def add_directory(inventory: VerifyInventory, folder: str) -> None:
    """Add the checkpoint in `folder`, or what is wrong with it."""
    inventory.found("DCP")
    prefix = f"{folder}/" if folder else ""
    index = prefix + METADATA
    try:
        if index not in inventory.sizes:
            raise DataMismatchError("is missing: without it no tensor can be found")
        found = read_metadata(inventory.location.read(index))
    except (DataMismatchError, TransferError) as error:
        inventory.error(index, unreadable(error))
        return
    inventory.unproved[index] = "DCP's metadata has no checksum"
    inventory.file(index)
    items: dict[str, list[_Item]] = defaultdict(list)
    for key, stored in found.storage_data.items():
        items[prefix + stored.relative_path].append((stored.offset, stored.length, key, stored))
    for path in [path for path in inventory.sizes if path.startswith(prefix)]:
        if path.endswith(DATA) and path not in items and "/" not in path[len(prefix) :]:
            inventory.error(path, "is not in .metadata: an extra file")
    parts: dict[str, list[TensorPart]] = defaultdict(list)
    for path, wanted in sorted(items.items()):
        _add_items(inventory, path, sorted(wanted, key=lambda one: one[:2]), found, parts)
    stored_at: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for key in found.storage_data:
        stored_at[key.fqn].add(tuple(key.offset or ()))
    for name, described in found.state_dict_metadata.items():
        if isinstance(described, metadata.TensorStorageMetadata):
            _add_tensor(inventory, index, name, described, stored_at[name], parts[name])
        elif not stored_at[name]:
            inventory.error(index, "names no file for it", name)


_Item = tuple[int, int, metadata.MetadataIndex, Any]
"""Offset, length, key and stored place of an item."""


def read_metadata(data: bytes) -> metadata.Metadata:
    """Return the metadata in a file `.metadata`. Raises DataMismatchError for anything else."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it is a {type(found).__name__}")
        _check(found)
    except (*DAMAGE, *REFUSED, MemoryError) as error:  # a damaged length may exceed the memory
        raise DataMismatchError(f"not metadata of DCP ({error})") from error
    return found


def _check(found: metadata.Metadata) -> None:
    """Use every field once: unpickling checks no name and no type of a field."""
    for key, stored in found.storage_data.items():
        if not isinstance(key, metadata.MetadataIndex):
            raise TypeError(f"a key is a {type(key).__name__}")
        if stored.offset < 0 or stored.length < 0:
            raise ValueError(f"an item has {stored.length} bytes at {stored.offset}")
        _ = (key.fqn + stored.relative_path, range(stored.offset), range(stored.length))
        _ = torch.Size(key.offset or ())
    for name, described in found.state_dict_metadata.items():
        if isinstance(described, metadata.TensorStorageMetadata):
            _ = (name + "", torch.Size(described.size), described.properties.dtype.itemsize)
            _ = [(torch.Size(one.offsets), torch.Size(one.sizes)) for one in described.chunks]


def _add_items(
    inventory: VerifyInventory,
    path: str,
    items: list[_Item],
    found: metadata.Metadata,
    parts: dict[str, list[TensorPart]],
) -> None:
    """Add the items of the file `path`, and to `parts` those of tensors by name."""
    names = [key.fqn for _, _, key, _ in items]
    if inventory.sizes.get(path, -1) < 0:
        inventory.error(path, f"is missing; it has {len(items)} items", names[0])
        return
    size = inventory.file(path).size_bytes
    end, before, part = 0, (0, 0), None
    with closing(inventory.location.source(path)) as opened:
        source = CachedSource(opened, size)
        for start, length, key, stored in items:
            try:
                if start + length > size:
                    missing = start + length - max(start, size)
                    raise DataMismatchError(f"the file ends too early: {missing} bytes are missing")
                if (start, length) != before:  # else tied tensors: one item of two names
                    if start < end:
                        raise DataMismatchError("overlaps the item before it")
                    part = _add_item(inventory, source, path, start, key, stored, found)
                if part is not None:
                    parts[key.fqn].append(part)
            except (DataMismatchError, TransferError) as error:
                inventory.error(path, unreadable(error), key.fqn)
            end, before = max(end, start + length), (start, length)
    if size not in (end, end + -end % ALIGNMENT):  # our files end with padding
        inventory.error(path, f"{size - end} bytes follow the last item")


def _add_item(
    inventory: VerifyInventory,
    source: CachedSource,
    path: str,
    start: int,
    key: metadata.MetadataIndex,
    stored: Any,
    found: metadata.Metadata,
) -> TensorPart | None:
    """Add one item; return the part of a tensor that it is."""
    described = found.state_dict_metadata.get(key.fqn)
    if getattr(stored, "transform_descriptors", None):
        inventory.unproved[path] = f"is encoded by {', '.join(stored.transform_descriptors)}"
        return None
    item = Slice(source, start, start + stored.length)
    if source.read(start, start + 4) != b"PK\x03\x04":
        if isinstance(described, metadata.BytesStorageMetadata):
            inventory.unproved[path] = "has values without checksum"
            return None
        raise DataMismatchError("does not begin with a zip of torch.save")
    add_zip(inventory, path, item, [], offset=start, name=key.fqn)
    if not isinstance(described, metadata.TensorStorageMetadata):
        return None
    try:
        index = TorchIndex.read(path, item)
        _, tensor, begin, strides = next(iter(tensors_of_zip(index, item)))
    except (*DAMAGE, *REFUSED, StopIteration) as error:
        raise DataMismatchError(f"its zip has no tensor ({error})") from error
    offsets = tuple(key.offset or (0,) * len(described.size))
    chunk = next((one for one in described.chunks if tuple(one.offsets) == offsets), None)
    wanted = described.properties.dtype, tuple(chunk.sizes) if chunk else ()
    if (tensor.dtype, tuple(tensor.shape)) != wanted:
        raise DataMismatchError(
            f"is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
            f".metadata says {dtype_name(wanted[0])} {list(wanted[1])}"
        )
    begin, stop = start + begin, start + begin + reach_bytes(tensor)
    return TensorPart(path, begin, stop, offsets, wanted[1], strides)


def _add_tensor(
    inventory: VerifyInventory,
    index: str,
    name: str,
    described: metadata.TensorStorageMetadata,
    stored: set[tuple[int, ...]],
    parts: list[TensorPart],
) -> None:
    shape = tuple(described.size)
    for chunk in described.chunks:
        if tuple(chunk.offsets) not in stored and (any(chunk.offsets) or () not in stored):
            inventory.error(index, f"names no file for the part at {list(chunk.offsets)}", name)
    held = sum(prod(chunk.sizes) for chunk in described.chunks)
    if held != prod(shape):
        inventory.error(index, f"its parts have {held} of {prod(shape)} elements", name)
    inventory.add(ListedTensor(name, dtype_name(described.properties.dtype), shape, tuple(parts)))
