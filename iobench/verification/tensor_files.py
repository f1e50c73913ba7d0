"""The tensors of single files: safetensors, and the zips of torch.save. Only indexes are read."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.formats import safetensors
from iobench.formats.safetensors import tensors_of
from iobench.formats.tensor_layouts import reach_bytes
from iobench.formats.tensors import dtype_name
from iobench.formats.torch_file import DAMAGE, TorchIndex, unpickled
from iobench.formats.torch_zip import ZipDirectory
from iobench.verification.inventory import (
    CheckedRange,
    ListedTensor,
    TensorPart,
    VerifyInventory,
    unreadable,
)
from iobench.writers.base import Source

_TENSORS = re.compile(
    r".*\.(safetensors|pt|pth|ckpt)|.*(model|optimizer|scheduler|training_args)[^/]*\.bin"
)
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
REFUSED = (pickle.UnpicklingError, AttributeError, ImportError)
"""What `weights_only` raises for classes that it does not admit."""
_NO_CHECKSUM = "safetensors has no checksums; iobench verify --record makes some"
_HEAD = 30  # bytes of a local header before the name
_CUT = "the file ends too early: {} bytes are missing"


def has_tensors(path: str) -> bool:
    """Return whether a file of this name has tensors, as a rule: `data.bin` has none."""
    return _TENSORS.fullmatch(path) is not None


def add_file(inventory: VerifyInventory, path: str) -> None:
    """Add the tensors of the file `path`, or what is wrong with it."""
    try:
        if inventory.sizes[path] < 0:
            raise DataMismatchError("is a link to a file that does not exist")
        inventory.file(path)
        if path.endswith(".safetensors"):
            _add_safetensors(inventory, path)
        else:
            _add_torch(inventory, path)
    except UsageError as error:  # this torch lacks a dtype
        inventory.unproved[path] = str(error)
    except (DataMismatchError, TransferError) as error:
        inventory.error(path, unreadable(error).removeprefix(f"{inventory.location.path(path)}: "))


def _add_safetensors(inventory: VerifyInventory, path: str) -> None:
    inventory.found("safetensors")
    location = inventory.location
    header, size = safetensors.read_header(path, location.home, location.writer)
    start, expected = 8 + len(header), 0
    for begin, end, name, kind in tensors_of(location.path(path), header):
        if begin != expected:
            inventory.error(path, f"begins at {begin} of the data, expected {expected}", name)
        expected = max(expected, end)
        if start + end > size:
            inventory.error(path, _CUT.format(start + end - max(size, start + begin)), name)
            continue
        offsets = (0,) * len(kind.shape)
        part = TensorPart(path, start + begin, start + end, offsets, kind.shape)
        inventory.add(ListedTensor(name, dtype_name(kind.dtype), kind.shape, (part,)))
    if start + expected < size:
        inventory.error(path, f"{size - start - expected} bytes follow the last tensor")
    inventory.unproved.setdefault(path, _NO_CHECKSUM)


def _add_torch(inventory: VerifyInventory, path: str) -> None:
    with closing(inventory.location.source(path)) as source:
        begin = source.read(len(_ZIP))
        if begin.startswith(_PICKLE):
            inventory.found("pickle")
            inventory.unproved[path] = "is a pickle, as of torch before 1.6, without checksums"
            return
        if begin != _ZIP:
            what = "zeros: a hole" if not any(begin) else "neither a zip nor a pickle of torch.save"
            raise DataMismatchError(f"begins with {what}" if begin else "is empty")
        inventory.found("torch")
        tensors: _Tensors = []
        try:
            tensors = list(tensors_of_zip(TorchIndex.read(path, source), source))
        except (DataMismatchError, *DAMAGE, *REFUSED) as error:
            why = str(error).strip().split("\n", 1)[0][:200]
            inventory.unproved[path] = f"its tensors have no names here: {why}"
        add_zip(inventory, path, source, tensors)
        for name, tensor, start, strides in tensors:
            stop = start + reach_bytes(tensor)
            shape = tuple(tensor.shape)
            part = TensorPart(path, start, stop, (0,) * len(shape), shape, strides)
            inventory.add(ListedTensor(name, dtype_name(tensor.dtype), shape, (part,)))


_Tensors = list[tuple[str, torch.Tensor, int, tuple[int, ...] | None]]


def add_zip(
    inventory: VerifyInventory,
    path: str,
    source: Source,
    tensors: _Tensors,
    *,
    offset: int = 0,
    name: str = "",
) -> None:
    """Add the records of the zip `source`, which begins at `offset` of the file `path`.

    `name` is that of the tensor whose file it is, where a file has many zips. Raises
    DataMismatchError for a zip that is damaged.
    """
    try:
        directory = ZipDirectory.read(source)
        starts = directory.data_starts(source, list(range(len(directory.names))))
    except (*DAMAGE, OSError) as error:
        if isinstance(error, TransferError):
            raise
        raise DataMismatchError(f"not a whole zip of torch.save: {error}") from error
    of_record = {start: name for name, _, start, _ in reversed(tensors)}
    records, heads = [], []
    bare = 0
    for number, record in enumerate(directory.names):
        size, start, crc = directory.sizes[number], starts[number], directory.checksums[number]
        stored = record not in directory.compressed
        if stored and not directory.headers[number] < start <= start + size <= directory.start:
            raise DataMismatchError(f"not a whole zip of torch.save: {record} is outside of it")
        shown = name or of_record.get(start, record)
        head = record.encode("utf-8", "surrogateescape")
        begin = offset + directory.headers[number]
        heads.append(CheckedRange(begin, begin + _HEAD + len(head), shown, head=head))
        if stored and (crc or not size):
            begin, stop = offset + start, offset + start + size
            records.append(CheckedRange(begin, stop, shown, crc32=crc))
        else:
            bare += size
    layers = inventory.file(path).layers
    while len(layers) < 2:
        layers.append([])
    layers[0] += sorted(records)
    layers[1] += sorted(heads)
    if bare:
        inventory.unproved[path] = "was saved without CRC-32, or compressed"


def tensors_of_zip(
    index: TorchIndex, source: Source
) -> Iterator[tuple[str, torch.Tensor, int, tuple[int, ...] | None]]:
    """Yield name, tensor without memory, offset in the file and strides of each tensor.

    `weights_only` decides what is unpickled, and `Other` replaces all other classes. Raises one of
    DAMAGE or UnpicklingError for what torch refuses.
    """
    keys: dict[int, int] = {}
    made = []

    def storage_of(key: str, size_bytes: int, location: str) -> Any:
        del location
        storage = torch.UntypedStorage(size_bytes, device="meta")
        if size_bytes > index.stops[int(key)] - index.starts[int(key)]:
            raise DataMismatchError(f"record data/{key} is shorter than its tensors")
        keys[storage._cdata] = int(key)
        made.append(storage)  # its address must not be used again
        return storage

    pickled = index.read_pickle(source)
    named = torch._weights_only_unpickler.get_globals_in_pkl(io.BytesIO(pickled))
    others = named - torch._weights_only_unpickler._get_allowed_globals().keys()
    with torch.serialization.safe_globals([(Other, name) for name in others]):
        state = unpickled(pickled, storage_of, weights_only=True)
    for name, tensor in _walk(state, "", set()):
        key = keys.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        if key is not None:
            start = index.starts[key] + int(tensor.storage_offset()) * tensor.itemsize
            strides = None if tensor.is_contiguous() else tuple(tensor.stride())
            yield name, tensor, start, strides


class Other:
    """Takes the place of a class whose code must not run: it keeps no value."""

    def __init__(self, *values: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            yield name or "tensor", value
        return
    if not isinstance(value, dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield from _walk(one, f"{name}.{key}" if name else str(key), seen)
