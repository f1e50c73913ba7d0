"""ExportSource: the tensors and plain values of a stored checkpoint, by name.

read_tensors: the bytes of tensors, in their order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint import metadata

from iobench import linux
from iobench.checkpoint.checksums import read_file
from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.ranked.structure import (
    StatePath,
    name_of,
    stock_values,
    tensor_entries,
    value_file,
)
from iobench.checkpoint.rebuild import readable
from iobench.checkpoint.retention import by_age
from iobench.checkpoint.serialized import SKELETON, TENSORS
from iobench.checkpoint.state_tree import parsed
from iobench.checkpoint.store import store_at
from iobench.checkpoint.stored import disjoint, one_by_one
from iobench.errors import DataMismatchError, UsageError
from iobench.formats.read_ahead import FileRange, joined, read_ahead
from iobench.formats.tensors import torch_dtype
from iobench.units import format_size
from iobench.verification import dcp
from iobench.verification.directories import inventory_of
from iobench.verification.inventory import (
    CheckedRange,
    FileTree,
    ListedTensor,
    TensorPart,
    VerifyInventory,
)
from iobench.verification.reading import RangeCheck
from iobench.writers.base import StoredReader, Writer
from iobench.writers.image import Bytes


class _Entry(NamedTuple):
    path: StatePath
    tensor: ListedTensor


class StoredValue(NamedTuple):
    """A plain value at `path` of the state, in the bytes of `torch.save`."""

    path: StatePath
    saved: bytes


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A stored checkpoint. The names join the keys and list positions of the state by dots.

    Both are in the order of the state. `inventory` has the checksums of the files.
    """

    inventory: VerifyInventory
    tensors: dict[str, _Entry]
    values: dict[str, StoredValue]

    @classmethod
    def open(cls, path: str | Path, writer: Writer) -> ExportSource:
        """Read the indexes of the checkpoint at `path`, or of the newest step of a run.

        Raises UsageError where there are no tensors, DataMismatchError for a damaged index, and
        TransferError.
        """
        location = FileTree(path, writer)
        where = path
        if not location.single and MANIFEST not in location.sizes:
            store = store_at(path, writer)
            for step in by_age(store)[-1:]:
                where = store.locate(step)
                location = FileTree(where, writer)
        inventory = inventory_of(location)
        damage = [one for one in inventory.findings if one.severity == "error"]
        if damage:
            raise DataMismatchError(f"{where}: {damage[0]}; iobench verify {where} shows all")
        values: dict[str, StoredValue] = {}
        if dcp.METADATA in location.sizes:
            tensors, values = _of_dcp(inventory)
        elif {SKELETON, TENSORS, MANIFEST} <= location.sizes.keys():
            tensors, values = _of_one_process(inventory)
        else:
            tensors = _of_files(path, inventory)
        for name, (_, tensor) in tensors.items():
            stored = sum(prod(part.sizes) for part in tensor.parts)
            if stored != prod(tensor.shape):
                raise DataMismatchError(f"{path}: {name} is not stored as plain tensors")
        if not tensors:
            raise UsageError(f"{path}: there are no tensors here that could be exported")
        return cls(inventory=inventory, tensors=tensors, values=values)

    @property
    def where(self) -> str:
        """The path of the checkpoint: of a run, that of the step."""
        location = self.inventory.location
        return location.path(next(iter(location.sizes))) if location.single else location.home

    def selected(self, key: str, strip_prefix: str) -> ExportSource:
        """Return what is below `key`, without it, and without `strip_prefix` in names that have it.

        Raises UsageError if nothing is left, or two tensors get one name.
        """
        tensors: dict[str, _Entry] = {}
        for name, (path, tensor) in self.tensors.items():
            renamed = _renamed(name, path, key, strip_prefix)
            if renamed is None:
                continue
            if renamed[0] in tensors:
                raise UsageError(
                    f"{self.where}: two tensors would have the name {renamed[0]}; "
                    "leave out the prefix, or export one part with a key"
                )
            tensors[renamed[0]] = _Entry(renamed[1], tensor)
        if not tensors:
            first = ", ".join(sorted({name.split(".", 1)[0] for name in self.tensors})[:10])
            raise UsageError(f"key {key!r}: there are no tensors below it; there is {first}")
        if strip_prefix and tensors.keys() <= self.selected(key, "").tensors.keys():
            raise UsageError(f"prefix {strip_prefix!r}: no name begins with it")
        renames = (
            (_renamed(name, value.path, key, strip_prefix), value.saved)
            for name, value in self.values.items()
        )
        values = {one[0]: StoredValue(one[1], saved) for one, saved in renames if one}
        return ExportSource(inventory=self.inventory, tensors=tensors, values=values)


def _renamed(name: str, path: StatePath, key: str, prefix: str) -> tuple[str, StatePath] | None:
    """Return name and path below `key` without `prefix`; None if it is not below `key`."""
    if key:
        if not name.startswith(f"{key}."):
            return None
        name = name[len(key) + 1 :]
        count = next((n for n in range(len(path)) if name_of(path[:n]) == key), None)
        path = (name,) if count is None else path[count:]
    if prefix and name.startswith(prefix):
        name, first = name[len(prefix) :], str(path[0])
        path = (first[len(prefix) :], *path[1:]) if first.startswith(prefix) else (name,)
    return name, path


_Found = tuple[dict[str, _Entry], dict[str, StoredValue]]


def _of_dcp(inventory: VerifyInventory) -> _Found:
    location = inventory.location
    found = dcp.read_metadata(location.read(dcp.METADATA))
    listed = {tensor.name: tensor for tensor in inventory.tensors}
    stored = {key.fqn: one for key, one in found.storage_data.items()}
    paths = found.planner_data if isinstance(found.planner_data, dict) else {}
    tensors: dict[str, _Entry] = {}
    values: dict[str, StoredValue] = {}
    for name, described in found.state_dict_metadata.items():
        path = paths.get(name)
        if not (isinstance(path, tuple) and all(isinstance(one, str | int) for one in path)):
            path = (name,)
        if name in listed:
            tensors[name] = _Entry(path, listed[name])
        elif isinstance(described, metadata.BytesStorageMetadata):
            place = stored[name]
            with closing(location.source(place.relative_path)) as source:
                source.seek(place.offset)
                values[name] = StoredValue(path, source.read(place.length))
    return tensors, values


def _of_one_process(inventory: VerifyInventory) -> _Found:
    location = inventory.location
    copy = StoredReader(location.writer, location.home)
    manifest = Manifest.parse(location.read(MANIFEST), location.path(MANIFEST))
    text = read_file(copy, manifest.file(SKELETON))
    leaves = {tensor.name: tensor for tensor in inventory.tensors}
    with readable(location.path(SKELETON)):
        skeleton = one_by_one(parsed(text))
        tensors = {
            name_of(path): _Entry(path, _viewed(entry, leaves))
            for path, entry in tensor_entries(skeleton, [0])
        }
        values = {
            name_of(one.path): StoredValue(one.path, value_file(one))
            for one in stock_values(skeleton, 0)
        }
    return tensors, values


def _viewed(entry: dict[str, Any], leaves: dict[str, ListedTensor]) -> ListedTensor:
    """Return the tensor that an entry of a skeleton describes: a leaf, or a part of its memory."""
    if "$array" in entry or "stride" not in entry:
        return leaves[entry["$tensor"] if "$tensor" in entry else entry["$array"]]
    leaf, shape, strides = leaves[entry["$tensor"]], tuple(entry["shape"]), tuple(entry["stride"])
    width = torch_dtype(entry["dtype"]).itemsize
    (part,) = leaf.parts
    start = part.start + entry["offset"]
    span = 1 + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
    stop = start + (span * width if prod(shape) else 0)
    if not part.start <= start <= stop <= part.stop:
        raise ValueError(f"a view at {entry['offset']} is outside {leaf.name}")
    rows = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dense = all(n == 1 or a == b for n, a, b in zip(shape, strides, rows, strict=True))
    view = TensorPart(part.file, start, stop, (0,) * len(shape), shape, None if dense else strides)
    return ListedTensor(leaf.name, entry["dtype"], shape, (view,))


def _of_files(path: str | Path, inventory: VerifyInventory) -> dict[str, _Entry]:
    """Return the tensors of the safetensors files of a directory, or else of its torch files."""
    here = [t for t in inventory.tensors if all("/" not in part.file for part in t.parts)]
    weights = [t for t in here if all(p.file.endswith(".safetensors") for p in t.parts)]
    found: dict[str, _Entry] = {}
    for tensor in weights or here:
        if tensor.name in found:
            raise UsageError(
                f"{path}: two files have a tensor {tensor.name}; give one of them: "
                + ", ".join(sorted(_files([found[tensor.name].tensor, tensor])))
            )
        found[tensor.name] = _Entry((tensor.name,), tensor)
    return found


def _files(tensors: list[ListedTensor]) -> Iterator[str]:
    return (part.file for tensor in tensors for part in tensor.parts)


_Key = tuple[str, int, int]
_Box = tuple[tuple[int, int], ...]
"""[begin, end) in each dimension."""


class _Piece(NamedTuple):
    """Bytes [start, stop) of the file of `part`, which belong to the tensor number `tensor`.

    Without a `block` they are the next bytes of the tensor. Otherwise they are the `box` of a block
    of this shape; `last` completes it.
    """

    tensor: int
    part: TensorPart
    start: int
    stop: int
    block: tuple[int, ...] = ()
    box: _Box = ()
    last: bool = False


def checksums_of(inventory: VerifyInventory) -> dict[_Key, CheckedRange]:
    """Return the ranges of files that have a checksum, by path, start and stop."""
    return {
        (path, one.start, one.stop): one
        for path, file in inventory.files.items()
        for layer in file.layers
        for one in layer
        if one.xxh3_64 or one.crc32 is not None
    }


def read_tensors(
    location: FileTree,
    tensors: Sequence[ListedTensor],
    expected: Mapping[_Key, CheckedRange],
    *,
    piece_bytes: int,
) -> Generator[tuple[int, Bytes], None, None]:
    """Yield the number of each of `tensors` with its next bytes, until it is complete.

    A tensor without elements is left out. The bytes stay until the next ones are taken. Memory is
    bounded by six times `piece_bytes` and what `check_fits` has found. Parts of tensors whose range
    is in `expected` are compared with its checksum. Raises DataMismatchError and TransferError.
    """
    check = _Check(location, tensors, expected)
    block: Any = None
    pieces = (
        FileRange(one.part.file, one.start, one.stop, one) for one in _pieces(tensors, piece_bytes)
    )
    reading = read_ahead(
        location.writer,
        location.home,
        location.sizes,
        joined(pieces, location.sizes, piece_bytes),
        largest_bytes=piece_bytes + 2 * linux.PAGE,
    )
    for window, memory in reading:
        for one in window.wanted:
            piece: _Piece = one.wanted
            data = memory[piece.start - window.start : piece.stop - window.start]
            check.take(piece, data)
            if not piece.block:
                yield piece.tensor, data
                continue
            words = _words(tensors[piece.tensor].dtype)
            if block is None:
                block = np.empty(piece.block, dtype=words)
            box = tuple(slice(*one) for one in piece.box)
            block[box] = data.view(words).reshape(block[box].shape)
            if piece.last:
                whole, block = block, None
                if piece.part.strides is not None:
                    steps = [one * words.itemsize for one in piece.part.strides]
                    whole = np.ndarray(piece.part.sizes, words, whole, 0, steps)
                yield piece.tensor, np.ascontiguousarray(whole).reshape(-1).view(np.uint8)


def check_fits(tensor: ListedTensor, name: str, memory_bytes: int) -> None:
    """Raise UsageError for a tensor that is stored transposed and does not fit into memory."""
    spans = [part.stop - part.start for part in tensor.parts if part.strides is not None]
    needed = 2 * sum(spans) + prod(tensor.shape) * torch_dtype(tensor.dtype).itemsize
    if spans and needed > memory_bytes:
        raise UsageError(
            f"{name} is not stored row by row, which takes {format_size(needed)} of memory; "
            f"memory is {format_size(memory_bytes)}"
        )
    if spans and len(tensor.parts) > 1:
        raise UsageError(f"{name} is stored in parts that are not row by row")


class _Check:
    """Compares the parts of tensors with their checksums while they are read in order."""

    def __init__(
        self,
        location: FileTree,
        tensors: Sequence[ListedTensor],
        expected: Mapping[_Key, CheckedRange],
    ) -> None:
        self._location, self._tensors, self._expected = location, tensors, expected
        self._running: dict[tuple[int, _Key], RangeCheck] = {}

    def take(self, piece: _Piece, data: Bytes) -> None:
        part = piece.part
        one = self._expected.get(part[:3])
        if one is None:
            return
        key = piece.tensor, part[:3]
        check = self._running.pop(key, None) or RangeCheck(one)
        check.update(data)
        if piece.stop < part.stop:
            self._running[key] = check
        elif check.difference():
            name = self._tensors[piece.tensor].name
            where = self._location.path(part.file)
            raise DataMismatchError(f"{where}: damaged, the checksum of {name} differs")


def _words(dtype: str) -> np.dtype[Any]:
    """Return a dtype of numpy whose values have the size of those of `dtype`."""
    width = torch_dtype(dtype).itemsize
    return np.dtype("c16" if width == 16 else f"u{width}")


def _pieces(tensors: Sequence[ListedTensor], largest: int) -> Iterator[_Piece]:
    for number, tensor in enumerate(tensors):
        parts = [part for part in tensor.parts if part.start < part.stop]
        if not disjoint([_box(part.offsets, part.sizes) for part in parts]):
            raise DataMismatchError(f"{tensor.name}: parts of it overlap")
        width = torch_dtype(tensor.dtype).itemsize
        if not prod(tensor.shape):
            continue
        if parts[0].strides is not None:
            yield from _strided(number, parts[0], largest // width, width)
            continue
        for block in _blocks(tensor.shape, max(1, largest // width)):
            yield from _block(number, parts, block, width)


def _strided(number: int, part: TensorPart, most: int, width: int) -> Iterator[_Piece]:
    count = (part.stop - part.start) // width
    for at in range(0, count, most):
        end = min(at + most, count)
        start, stop = part.start + at * width, part.start + end * width
        yield _Piece(number, part, start, stop, (count,), ((at, end),), last=end == count)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> _Box:
    return tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[_Box]:
    """Yield boxes of up to `most` elements that follow one another in a tensor, row by row."""
    dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most), 0)
    if not shape:
        yield ()
        return
    rows = max(1, most // prod(shape[dim + 1 :]))
    rest = [(0, size) for size in shape[dim + 1 :]]
    for index in product(*map(range, shape[:dim])):
        for at in range(0, shape[dim], rows):
            end = min(at + rows, shape[dim])
            yield (*((one, one + 1) for one in index), (at, end), *rest)


def _block(number: int, parts: Sequence[TensorPart], block: _Box, width: int) -> Iterator[_Piece]:
    """Yield the pieces of a block. What each part has of it is in one piece in the file."""
    found: list[tuple[_Box, TensorPart]] = []
    for part in parts:
        own = _box(part.offsets, part.sizes)
        box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, own, strict=True))
        if all(a < b for a, b in box):
            found.append((box, part))
    found.sort(key=lambda one: one[0])
    cut = next((dim for dim, (a, b) in enumerate(block) if b - a > 1), len(block))
    in_rows = all(box[cut + 1 :] == block[cut + 1 :] for box, _ in found)
    shape = () if in_rows else tuple(b - a for a, b in block)
    for count, (box, part) in enumerate(found, 1):
        first = 0
        for (a, _), offset, size in zip(box, part.offsets, part.sizes, strict=True):
            first = first * size + a - offset
        start = part.start + first * width
        stop = start + prod(b - a for a, b in box) * width
        within = tuple((a - o, b - o) for (a, b), (o, _) in zip(box, block, strict=True))
        yield _Piece(
            number, part, start, stop, shape, () if in_rows else within, last=count == len(found)
        )
