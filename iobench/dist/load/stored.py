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

from iobench.checkpoint.compared import read_compared
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.rebuild import readable
from iobench.checkpoint.store import CheckpointStore
from iobench.dist.saves.index import INDEX
from iobench.formats.tensors import torch_dtype
from iobench.writers.base import Writer

__all__ = ["StoredChunk", "StoredPiece", "StoredState", "StoredTensor", "stored_state"]


class StoredPiece(NamedTuple):
    """The bytes [start, stop) of the file `path`, and their XXH3-64 in hex."""

    path: str
    start: int
    stop: int
    xxh3_64: str
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
    """The skeleton of the state, its tensors by name, and the files by path."""

    skeleton: Any = field(repr=False)
    tensors: dict[str, StoredTensor] = field(repr=False)
    files: dict[str, FileRecord] = field(repr=False)


def stored_state(
    store: CheckpointStore, writer: Writer, step: int, manifest: Manifest
) -> StoredState:
    """Read the index of a checkpoint that several ranks saved.

    Raises DataMismatchError for damage, and TransferError.
    """
    location = store.locate(step)
    text = read_compared(writer, location, manifest.file(INDEX))
    with readable(os.path.join(location, INDEX)):
        found = _parsed(text)
        pieces = [_pieces(file) for file in manifest.files[: manifest.world_size]]
        tensors = {name: one.stored(pieces) for name, one in found.tensors.items()}
    return StoredState(
        skeleton=found.skeleton,
        tensors=tensors,
        files={file.path: file for file in manifest.files},
    )


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
