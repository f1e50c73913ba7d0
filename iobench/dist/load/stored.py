"""StoredState: which piece of which file of a checkpoint has which part of each tensor."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.checkpoint.compared import compared
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.store import CheckpointStore
from iobench.dist.saves.index import INDEX
from iobench.errors import DataMismatchError
from iobench.formats.tensors import torch_dtype
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

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
    record = manifest.file(INDEX)
    where = os.path.join(location, INDEX)
    image = FileImage.of(INDEX, [np.empty(record.size_bytes, dtype=np.uint8)])
    with compared(image, record, where) as incoming:
        writer.read(incoming, location)
    try:
        found = json.loads(image.views(0, image.size_bytes)[0].tobytes())
        pieces = [_pieces(file) for file in manifest.files[: manifest.world_size]]
        tensors = {
            name: StoredTensor(
                torch_dtype(one["dtype"]),
                tuple(one["shape"]),
                [
                    StoredChunk(pieces[rank][number], at, tuple(offsets), tuple(sizes))
                    for rank, number, at, offsets, sizes in one["chunks"]
                ],
            )
            for name, one in found["tensors"].items()
        }
        return StoredState(
            skeleton=found["skeleton"],
            tensors=tensors,
            files={file.path: file for file in manifest.files},
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataMismatchError(f"{where}: not the index of a checkpoint ({error!r})") from error


def _pieces(file: FileRecord) -> list[StoredPiece]:
    ends = itertools.accumulate(piece.size_bytes for piece in file.pieces)
    return [
        StoredPiece(file.path, end - piece.size_bytes, end, piece.xxh3_64, piece.name)
        for piece, end in zip(file.pieces, ends, strict=True)
    ]
