"""StoredState: which piece of which file of a checkpoint has which part of each tensor."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import xxhash

from iobench.checkpoint.compared import read_file
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.ranked.index import INDEX
from iobench.checkpoint.ranked.stock_values import parsed_skeleton
from iobench.checkpoint.rebuild import readable
from iobench.checkpoint.serialized import FORMAT, SKELETON, TENSORS
from iobench.errors import DataMismatchError
from iobench.formats import safetensors
from iobench.formats.safetensors_runs import Kind, runs_of
from iobench.formats.tensors import torch_dtype
from iobench.writers.copy_reader import CopyReader

__all__ = ["StoredChunk", "StoredPiece", "StoredState", "StoredTensor", "stored_state"]


class StoredPiece(NamedTuple):
    """The bytes [start, stop) of the file `path`, and their XXH3-64 in hex.

    None in a format without checksums.
    """

    path: str
    start: int
    stop: int
    xxh3_64: str | None
    name: str


class StoredChunk(NamedTuple):
    """The elements [offset, offset + size) of a tensor, `data_at` bytes after a piece begins."""

    piece: StoredPiece
    data_at: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The skeleton of the state, its tensors by name, and the files by path.

    `world_size` ranks saved it. With `has_views` some tensors of the state are not whole tensors
    of the files: they share memory, as a slice and its base.
    """

    skeleton: Any = field(repr=False)
    world_size: int
    has_views: bool = False
    tensors: dict[str, StoredTensor] = field(repr=False)
    files: dict[str, FileRecord] = field(repr=False)


def stored_state(copy: CopyReader, manifest: Manifest) -> StoredState:
    """Read the index of a checkpoint that several ranks saved, or the header of one process.

    Raises DataMismatchError for damage, and TransferError.
    """
    if manifest.format == FORMAT:
        return _of_one_process(copy, manifest)
    text = read_file(copy, manifest.file(INDEX))
    with readable(os.path.join(copy.location, INDEX)):
        found = _parsed(text)
        pieces = [_pieces(file) for file in manifest.files[: manifest.world_size]]
        tensors = {name: one.stored(pieces) for name, one in found.tensors.items()}
    return StoredState(
        skeleton=found.skeleton,
        world_size=manifest.world_size,
        tensors=tensors,
        files={file.path: file for file in manifest.files},
    )


def _of_one_process(copy: CopyReader, manifest: Manifest) -> StoredState:
    location, record = copy.location, manifest.file(TENSORS)
    file = os.path.join(location, TENSORS)
    text = read_file(copy, manifest.file(SKELETON))
    header, size = safetensors.read_header(TENSORS, location, copy)
    begin = len(header).to_bytes(8, "little") + header
    if size != record.size_bytes:
        raise DataMismatchError(f"{file}: has {size} bytes, its manifest says {record.size_bytes}")
    if xxhash.xxh3_64_hexdigest(begin) != record.pieces[0].xxh3_64:
        raise DataMismatchError(f"{file}: damaged, the checksum of its header differs")
    runs = runs_of(file, header, size - len(begin), one_by_one=True)
    with readable(file):
        pieces = {piece.name: piece for piece in _pieces(record)}
        tensors = {
            name: _whole(pieces[name], len(begin) + at, kind)
            for run in runs
            for name, at, kind in run.tensors()
        }
    with readable(os.path.join(location, SKELETON)):
        views: list[Any] = []
        return StoredState(
            skeleton=_one_by_one(parsed_skeleton(text.decode()), views),
            world_size=1,
            has_views=bool(views),
            tensors=tensors,
            files={one.path: one for one in manifest.files},
        )


def _whole(piece: StoredPiece, at: int, kind: Kind) -> StoredTensor:
    """Return a tensor that is a piece. Raises ValueError if the header and the manifest differ."""
    if (piece.start, piece.stop) != (at, at + kind.size_bytes):
        raise ValueError(f"{piece.name} has another place in the manifest")
    return StoredTensor(
        kind.dtype, kind.shape, [StoredChunk(piece, 0, (0,) * len(kind.shape), kind.shape)]
    )


def _one_by_one(skeleton: Any, views: list[Any]) -> Any:
    """Return a skeleton in which each tensor is described by itself; add its views to `views`."""
    if isinstance(skeleton, list):
        return [_one_by_one(item, views) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "$tensors" in skeleton:
        prefix, *keys = skeleton["$tensors"]
        return {key: {"$tensor": prefix + key} for key in keys}
    if "$tensor" in skeleton and "stride" in skeleton:
        views.append(skeleton)
    return {key: _one_by_one(item, views) for key, item in skeleton.items()}


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct):
    """A tensor in the index. A chunk has a rank, a piece, a begin in it, offsets and sizes."""

    dtype: str
    shape: tuple[_Count, ...]
    chunks: list[tuple[_Count, _Count, _Count, tuple[_Count, ...], tuple[_Count, ...]]]

    def stored(self, pieces: list[list[StoredPiece]]) -> StoredTensor:
        """Return the tensor. Raises ValueError or LookupError for one that no save has written."""
        dtype, dims, elements = torch_dtype(self.dtype), len(self.shape), 0
        chunks = []
        for rank, number, at, offsets, sizes in self.chunks:
            piece, count = pieces[rank][number], prod(sizes)
            end = at + count * dtype.itemsize
            if not dims == len(offsets) == len(sizes) or end > piece.stop - piece.start:
                raise ValueError(f"{piece.name} of {piece.path} is not a part of its tensor")
            chunks.append(StoredChunk(piece, at, offsets, sizes))
            elements += count
        if elements != prod(self.shape):  # before memory is taken for it
            raise ValueError(f"chunks of {elements} elements for a tensor of {list(self.shape)}")
        return StoredTensor(dtype, self.shape, chunks)


class _Index(msgspec.Struct):
    skeleton: Any
    tensors: dict[str, _Tensor]


def _parsed(text: bytes) -> _Index:
    with suppress(ValueError, RecursionError):  # such as half of a surrogate pair
        return msgspec.json.decode(text, type=_Index)
    return msgspec.convert(json.loads(text), _Index)


def _pieces(file: FileRecord) -> list[StoredPiece]:
    ends = itertools.accumulate(piece.size_bytes for piece in file.pieces)
    return [
        StoredPiece(file.path, end - piece.size_bytes, end, piece.xxh3_64, piece.name)
        for piece, end in zip(file.pieces, ends, strict=True)
    ]
