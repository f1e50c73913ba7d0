"""StoredState: which piece of which file of a checkpoint has which part of each tensor.

It is compared with the state `like` that a load expects.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from iobench.checkpoint.checksums import read_file
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.per_rank import PerRank
from iobench.checkpoint.ranked.dcp_files import INDEX
from iobench.checkpoint.ranked.structure import (
    StatePath,
    local_box,
    name_of,
    parsed_skeleton,
    shared_skeleton,
    stock_paths,
)
from iobench.checkpoint.serialized import FORMAT, SKELETON, TENSORS
from iobench.checkpoint.state_tree import readable
from iobench.errors import DataMismatchError, StateMismatchError
from iobench.formats import safetensors
from iobench.formats.safetensors_runs import Kind, runs_of
from iobench.formats.tensors import dtype_name, torch_dtype
from iobench.writers.base import CopyReader

__all__ = [
    *("Compared", "StoredChunk", "StoredPiece", "StoredState", "StoredTensor"),
    *("compare_state", "compared_with", "empty_local", "is_sharded"),
    *("pieces_of", "resharded", "sharded_like", "one_by_one", "stored_state", "tensors_of"),
]


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
        pieces = [pieces_of(file) for file in manifest.files[: manifest.world_size]]
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
        pieces = {piece.name: piece for piece in pieces_of(record)}
        tensors = {
            name: _whole(pieces[name], len(begin) + at, kind)
            for run in runs
            for at, _, name, kind in run.entries
        }
    with readable(os.path.join(location, SKELETON)):
        views: list[Any] = []
        return StoredState(
            skeleton=one_by_one(parsed_skeleton(text.decode()), views),
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


def one_by_one(skeleton: Any, views: list[Any]) -> Any:
    """Return a skeleton in which each tensor is described by itself; add its views to `views`."""
    if isinstance(skeleton, list):
        return [one_by_one(item, views) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "$tensors" in skeleton:
        prefix, *keys = skeleton["$tensors"]
        return {key: {"$tensor": prefix + key} for key in keys}
    if "$tensor" in skeleton and "stride" in skeleton:
        views.append(skeleton)
    return {key: one_by_one(item, views) for key, item in skeleton.items()}


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


def pieces_of(file: FileRecord) -> list[StoredPiece]:
    """Return the pieces of a file, in order."""
    ends = itertools.accumulate(piece.size_bytes for piece in file.pieces)
    return [
        StoredPiece(file.path, end - piece.size_bytes, end, piece.xxh3_64, piece.name)
        for piece, end in zip(file.pieces, ends, strict=True)
    ]


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor. Without one, its module is not imported."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def tensors_of(
    value: Any, path: StatePath = (), kinds: tuple[type, ...] = (torch.Tensor, np.ndarray)
) -> Iterator[tuple[StatePath, Any]]:
    """Yield the path and the value of every tensor and array of a state, without PerRank."""
    if isinstance(value, kinds):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, (*path, str(key)), kinds)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(item, (*path, number), kinds)


def compare_state(like: Any, state: Any, where: str) -> None:
    """Compare a state, still without its bytes, with `like`; see `compared_with`."""
    kinds = (torch.Tensor, np.ndarray, PerRank)
    expected = {path: _shown(value) for path, value in tensors_of(like, (), kinds)}
    # Of another world size, a PerRank has other values, or a list of them.
    own = {path for path, what in expected.items() if not what}
    found = {
        path: _shown(value)
        for path, value in tensors_of(state)
        if not own or not any(path[:length] in own for length in range(len(path) + 1))
    }
    _compare(like, {path: what for path, what in expected.items() if what}, found, where)


def _shown(value: Any) -> str:
    """Return dtype and shape of a tensor or an array, and "" for a PerRank."""
    if isinstance(value, PerRank):
        return ""
    dtype = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else value.dtype
    return f"{dtype} {list(value.shape)}"


def _compare(
    like: Any, expected: Mapping[StatePath, str], found: Mapping[StatePath, str], where: str
) -> None:
    """Raise StateMismatchError unless they are equal, for the top-level entries of `like`."""
    if isinstance(like, dict):
        keys = set(map(str, like))
        found = {path: what for path, what in found.items() if not path or path[0] in keys}
    missing = [name_of(path) for path in expected if path not in found]
    unexpected = [name_of(path) for path in found if path not in expected]
    misshaped = {
        name_of(path): (what, found[path])
        for path, what in expected.items()
        if found.get(path, what) != what
    }
    if missing or unexpected or misshaped:
        raise StateMismatchError(where, missing=missing, unexpected=unexpected, misshaped=misshaped)


class Compared(NamedTuple):
    """The DTensors of `like` by the name of the saved tensor that they show.

    `gone` are the paths of saved tensors that only other ranks get.
    """

    sharded: dict[str, Any]
    gone: frozenset[StatePath]


def compared_with(
    like: Any, stored: StoredState, where: str, elsewhere: Collection[StatePath] = ()
) -> Compared:
    """Compare a checkpoint with `like`. `elsewhere` are the tensors of the other ranks' `like`.

    Raises StateMismatchError unless all tensors of `like` are in the checkpoint and the other way
    round, for the top-level entries of `like`, with equal dtypes and shapes. Those that another
    rank has may lack here. What is in a PerRank is not compared.
    """
    if like is None:
        return Compared({}, frozenset())
    saved = dict(stock_paths(shared_skeleton(stored.skeleton), []))
    expected = dict(tensors_of(like))
    gone = frozenset(path for path in saved if path in elsewhere and path not in expected)
    saved = {path: name for path, name in saved.items() if path not in gone}
    found = {}
    for path, name in saved.items():
        tensor = stored.tensors[name]
        found[path] = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    wanted = {
        # The bytes of an array are saved, perhaps with another dtype.
        path: found.get(path, "") if isinstance(value, np.ndarray) else _shown(value)
        for path, value in expected.items()
    }
    _compare(like, wanted, found, where)
    sharded = {saved[path]: value for path, value in expected.items() if is_sharded(value)}
    return Compared(sharded, gone)


def empty_local(sharded: Any) -> torch.Tensor:
    """Return new memory for this rank's part of a DTensor, on its device."""
    device = sharded._local_tensor.device
    if device.type == "meta":
        kind = sharded.device_mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    return torch.empty(local_box(sharded)[0], dtype=sharded.dtype, device=device)


def sharded_like(sharded: Any, local: torch.Tensor) -> Any:
    """Return a DTensor with the sharding of `sharded` on the memory `local`. No collective."""
    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def resharded(state: Any, like: Any) -> Any:
    """Return `state` with the full tensors replaced by DTensors where `like` has some."""
    return _Resharded().of(state, like)


class _Resharded:
    """Makes the DTensors of one state. Tied tensors stay tied."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, state: Any, like: Any) -> Any:
        if isinstance(state, torch.Tensor):
            if not is_sharded(like):
                return state
            key = id(state), like._spec
            if key not in self._made:
                self._made[key] = _part_of(state, like)
            return self._made[key]
        if isinstance(like, PerRank):
            return self.of(state, like.value)
        if isinstance(like, Mapping) and isinstance(state, dict):
            for key in state.keys() & like.keys():
                state[key] = self.of(state[key], like[key])
        elif (
            isinstance(like, list | tuple)
            and type(state) in (list, tuple)
            and len(like) == len(state)
        ):
            pairs = zip(state, like, strict=True)
            return type(state)(self.of(one, other) for one, other in pairs)
        return state


def _part_of(full: torch.Tensor, sharded: Any) -> Any:
    local, part = empty_local(sharded), full
    for dim, (size, begin) in enumerate(zip(*local_box(sharded), strict=True)):
        part = part.narrow(dim, begin, size)
    local.copy_(part)
    return sharded_like(sharded, local)
