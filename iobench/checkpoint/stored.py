"""StoredState: which piece of which file of a checkpoint has which part of each tensor.

It is compared with the state `like` that a load expects. `StateReader` reads a checkpoint, whether
one process or several ranks saved it, for any number of ranks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from iobench.checkpoint.checksums import read_compared, read_file
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.piece_reader import PieceReader, StoredPiece, pieces_of
from iobench.checkpoint.ranked.dcp_files import INDEX
from iobench.checkpoint.ranked.structure import (
    StatePath,
    empty_local,
    is_sharded,
    local_box,
    name_of,
    sharded_like,
    shared_skeleton,
    stock_paths,
    tensor_entries,
)
from iobench.checkpoint.rebuild import readable, unflatten
from iobench.checkpoint.serialized import FORMAT, SKELETON, TENSORS
from iobench.checkpoint.state_tree import parsed
from iobench.errors import DataMismatchError, StateError, StateMismatchError
from iobench.formats import safetensors
from iobench.formats.collector import collector_paused
from iobench.formats.safetensors import Kind, runs_of
from iobench.formats.tensors import dtype_name, tensor_from_bytes, torch_dtype
from iobench.ranks.control import Control
from iobench.units import MIB
from iobench.writers.base import CopyReader
from iobench.writers.image import Bytes
from iobench.writers.transfer import Transfer


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

    `world_size` ranks saved it.
    """

    skeleton: Any = field(repr=False)
    world_size: int
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
        found = parsed(text, _Index)
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
    if [xxhash.xxh3_64_hexdigest(begin)] != [piece.xxh3_64 for piece in record.pieces[:1]]:
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
        return StoredState(
            skeleton=one_by_one(parsed(text)),
            world_size=1,
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


def one_by_one(skeleton: Any) -> Any:
    """Return a skeleton in which each tensor is described by itself."""
    if isinstance(skeleton, list):
        return [one_by_one(item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "$tensors" in skeleton:
        prefix, *keys = skeleton["$tensors"]
        return {key: {"$tensor": prefix + key} for key in keys}
    return {key: one_by_one(item) for key, item in skeleton.items()}


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


def tensors_of(value: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Yield the path and the value of every tensor and array of a state, without PerRank."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(item, (*path, number))


def _shown(dtype: torch.dtype | np.dtype[Any], shape: Sequence[int]) -> str:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    return f"{name} {list(shape)}"


def _stored(
    entry: Mapping[str, Any], tensors: Mapping[str, StoredTensor] | Mapping[str, torch.Tensor]
) -> str:
    """Return dtype and shape of a tensor or an array in the skeleton."""
    if "$array" in entry:
        return _shown(np.dtype(entry["dtype"]), entry["shape"])
    if "stride" in entry:
        return _shown(torch_dtype(entry["dtype"]), entry["shape"])
    return _shown(tensors[entry["$tensor"]].dtype, tensors[entry["$tensor"]].shape)


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


def compared_with(
    like: Any,
    skeleton: Any,
    tensors: Mapping[str, StoredTensor] | Mapping[str, torch.Tensor],
    where: str,
    elsewhere: Collection[StatePath] = (),
) -> dict[str, Any]:
    """Compare a checkpoint with `like`. `elsewhere` are the tensors of the other ranks' `like`.

    Return the DTensors of `like` by the name of the saved tensor that they show. Raises
    StateMismatchError unless all tensors of `like` are in the checkpoint and the other way round,
    for the top-level entries of `like`, with equal dtypes and shapes. Those that another rank has
    may lack here. What is in a PerRank is not compared. Raises StateError for a DTensor whose bytes
    describe another tensor too: its transpose, or a slice in files of older versions.
    """
    if like is None:
        return {}
    with readable(where):
        listed = tensor_entries(shared_skeleton(skeleton), [])
        saved = {path: entry for path, entry in listed if path not in elsewhere}
        found = {path: _stored(entry, tensors) for path, entry in saved.items()}
    expected = dict(tensors_of(like))
    wanted = {path: _shown(value.dtype, value.shape) for path, value in expected.items()}
    _compare(like, wanted, found, where)
    named = ((saved[path].get("$tensor", ""), one) for path, one in expected.items())
    sharded = {name: one for name, one in named if is_sharded(one)}
    views = {entry["$tensor"] for entry in saved.values() if "stride" in entry}
    if shared := views & sharded.keys():
        raise StateError(
            f"{where}: the bytes of {min(shared)} describe another tensor too, so it cannot be "
            "loaded as a DTensor; load it in full, and distribute it then"
        )
    return sharded


def paths_elsewhere(ranks: Control, like: Any) -> frozenset[StatePath]:
    """Return the paths of the tensors that only the `like` of other ranks has. A call of all.

    A rank without `like` gets all tensors: then there are none.
    """

    def own() -> list[StatePath]:
        return [] if like is None else sorted((path for path, _ in tensors_of(like)), key=str)

    every = ranks.distinct("keys of like", own)
    paths = [frozenset(map(tuple, one)) for one in every]
    return frozenset() if like is None else frozenset().union(*paths) - paths[ranks.world.rank]


def without(state: Any, like: Any, gone: Collection[StatePath], where: str) -> Any:
    """Return `state` without the tensors at the paths `gone`.

    What has tensors in a dict, all of them gone, and no place in `like`, is left out whole. Raises
    StateMismatchError for a tensor in a list: the others would get other positions.
    """
    if not gone:
        return state
    found, _, _ = _without(state, like, gone, where, ())
    return found


def _without(
    value: Any, like: Any, gone: Collection[StatePath], where: str, path: StatePath
) -> tuple[Any, bool, bool]:
    """Return the value, whether it has tensors, and whether it had others that are gone."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value, path not in gone, path in gone
    if isinstance(value, dict):
        inner = like if isinstance(like, dict) else {}
        keeps = lost = False
        for key in list(value):
            place = (*path, str(key))
            item, has, had = _without(value[key], inner.get(key), gone, where, place)
            if had and not has and (key not in inner or place in gone):
                del value[key]
            else:
                value[key] = item
            keeps, lost = keeps or has, lost or had
        return value, keeps, lost
    if type(value) in (list, tuple):
        others = like if isinstance(like, list | tuple) and len(like) == len(value) else value
        items = []
        for number, (one, other) in enumerate(zip(value, others, strict=True)):
            place = (*path, number)
            if place in gone:
                raise StateMismatchError(where, missing=[], unexpected=[name_of(place)])
            items.append(_without(one, other, gone, where, place))
        kept = type(value)(item for item, _, _ in items)
        return kept, any(has for _, has, _ in items), any(had for _, _, had in items)
    return value, False, False


_LARGE = MIB


@dataclass
class WantedTensor:
    """The elements at `offsets` of a saved tensor, to be copied into `memory`."""

    memory: torch.Tensor
    offsets: tuple[int, ...] = ()
    sharded: Any = None
    """The DTensor of `like`; None for a plain tensor."""

    def tensor(self) -> Any:
        """Return the tensor, when its memory is filled."""
        return self.memory if self.sharded is None else sharded_like(self.sharded, self.memory)


class _Copy(NamedTuple):
    """A part of a chunk that this rank needs: from `begin` in the chunk to `place` in `wanted`."""

    chunk: StoredChunk
    dtype: torch.dtype
    begin: tuple[int, ...]
    place: torch.Tensor
    wanted: WantedTensor

    @property
    def is_whole(self) -> bool:
        """Whether all of the chunk is all of a large tensor in host memory."""
        memory = self.wanted.memory
        shape = tuple(memory.shape)
        whole = shape == tuple(self.place.shape) == self.chunk.sizes
        return whole and memory.is_cpu and memory.nbytes >= _LARGE


@dataclass(frozen=True, kw_only=True)
class StateReader:
    """Reads the state for `rank` of `ranks` from checkpoints that one process or several saved.

    `elsewhere` are the paths of tensors that only the `like` of other ranks has: this rank does not
    get them. Every byte that is used is compared with its checksum.
    """

    like: Any = None
    rank: int = 0
    ranks: int = 1
    elsewhere: Collection[StatePath] = ()

    def read(
        self, copy: CopyReader, where: str, manifest: Manifest, reader: PieceReader
    ) -> tuple[Any, Transfer]:
        """Return the state, and the transfer of its tensors.

        `copy` reads the files, which `manifest` describes; messages name `where`. `reader` fetches
        the pieces that this rank needs. A checkpoint of one process is read as one file by a rank
        that is alone. Raises what `restore` raises.
        """
        if manifest.format not in (FORMAT, "dcp"):
            raise DataMismatchError(f"{where} has the unknown format {manifest.format!r}")
        if manifest.format != FORMAT or self.ranks > 1 or _shards(self.like):
            return self._by_pieces(copy, where, stored_state(copy, manifest), reader)
        return self._whole_file(copy, where, manifest)

    def _whole_file(self, copy: CopyReader, where: str, manifest: Manifest) -> tuple[Any, Transfer]:
        text = read_file(copy, manifest.file(SKELETON))
        tensors, image = safetensors.prepare(TENSORS, copy.location, copy)
        with collector_paused(), readable(os.path.join(copy.location, SKELETON)):
            skeleton = parsed(text)
            state = unflatten(skeleton, tensors)
        if self.like is not None:
            compared_with(self.like, one_by_one(skeleton), tensors, where)
        return state, read_compared(copy, image, manifest.file(TENSORS))

    def _by_pieces(
        self, copy: CopyReader, where: str, stored: StoredState, reader: PieceReader
    ) -> tuple[Any, Transfer]:
        """Read only the pieces of which this rank needs a part.

        That is its part of the DTensors in `like`, and all of the other tensors. A large piece that
        is a whole tensor stays where it was read.
        """
        with readable(where):
            skeleton = _selected(stored.skeleton, self.rank, self.ranks)
            listed = stock_paths(skeleton, range(stored.world_size))
            names = dict.fromkeys(name for _, name in listed)
            if lacking := names.keys() - stored.tensors.keys():
                raise DataMismatchError(f"lacks the tensor {min(lacking)}")
        sharded = compared_with(self.like, stored.skeleton, stored.tensors, where, self.elsewhere)
        needed = {name for path, name in listed if path not in self.elsewhere}
        wanted: dict[str, WantedTensor] = {}
        copies: dict[StoredPiece, list[_Copy]] = defaultdict(list)
        with collector_paused():
            for name in names:
                saved = stored.tensors[name]
                wanted[name] = _wanted(saved, sharded.get(name))
                if name in needed:
                    _add_copies(name, saved, wanted[name], copies)

        def deliver(piece: StoredPiece, data: Bytes) -> bool:
            first = copies[piece][0]
            if len(copies[piece]) == 1 and first.is_whole:
                first.wanted.memory = _data_of(first, data)
                return True
            for one in copies[piece]:
                _copy(one, data)
            return False

        transfer = reader.read(copy, stored.files, list(copies), deliver)
        with collector_paused():
            tensors = {name: one.tensor() for name, one in wanted.items()}
            state = unflatten(skeleton, tensors, rank=self.rank, ranks=self.ranks)
            return without(state, self.like, self.elsewhere, where), transfer


def _selected(value: Any, rank: int, ranks: int) -> Any:
    """Return the skeleton with this rank's values of each PerRank that `ranks` ranks saved."""
    if isinstance(value, list):
        return [_selected(item, rank, ranks) for item in value]
    if not isinstance(value, dict):
        return value
    own = value.get("$per_rank")
    if own is not None and len(own) == ranks:
        return _selected(own[rank], rank, ranks)
    return {key: _selected(item, rank, ranks) for key, item in value.items()}


def _wanted(saved: StoredTensor, sharded: Any) -> WantedTensor:
    """Return what this rank needs of a tensor. Its memory has no pages yet."""
    if sharded is None:
        memory = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        return WantedTensor(memory, (0,) * len(saved.shape))
    return WantedTensor(empty_local(sharded), local_box(sharded)[1], sharded)


def _add_copies(
    name: str, saved: StoredTensor, wanted: WantedTensor, copies: dict[StoredPiece, list[_Copy]]
) -> None:
    """Add what to copy. Raises DataMismatchError if the chunks do not cover what is wanted."""
    left = wanted.memory.numel()
    parts: list[tuple[tuple[int, int], ...]] = []
    for chunk in saved.chunks:
        begins, place = [], wanted.memory
        for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            first = max(at, wanted.offsets[dim])
            last = min(at + size, wanted.offsets[dim] + wanted.memory.shape[dim])
            if first >= last:
                break
            begins.append(first - at)
            place = place.narrow(dim, first - wanted.offsets[dim], last - first)
        else:
            left -= place.numel()
            ends = zip(begins, place.shape, chunk.offsets, strict=True)
            parts.append(tuple((at + begin, at + begin + size) for begin, size, at in ends))
            copies[chunk.piece].append(_Copy(chunk, saved.dtype, tuple(begins), place, wanted))
    if left or not disjoint(parts):
        raise DataMismatchError(f"the chunks of {name} do not cover it, each element once")


def disjoint(parts: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Return whether no two boxes have an element in common.

    A box has a begin and an end in each dimension. The sweep is along the dimension in which most
    of them begin at different places, so shards along one dimension cost a sort.
    """
    if len(parts) < 2:
        return True
    if not parts[0]:
        return False  # scalars
    dims = range(len(parts[0]))
    dim = max(dims, key=lambda dim: len({part[dim][0] for part in parts}))
    reached: list[tuple[tuple[int, int], ...]] = []
    for part in sorted(parts, key=lambda part: part[dim][0]):
        reached = [other for other in reached if other[dim][1] > part[dim][0]]
        for other in reached:
            if all(a < d and c < b for (a, b), (c, d) in zip(part, other, strict=True)):
                return False
        reached.append(part)
    return True


def _data_of(copy: _Copy, data: Bytes) -> torch.Tensor:
    chunk, size = copy.chunk, prod(copy.chunk.sizes) * copy.dtype.itemsize
    return tensor_from_bytes(data[chunk.data_at : chunk.data_at + size], copy.dtype, chunk.sizes)


def _copy(copy: _Copy, data: Bytes) -> None:
    found = _data_of(copy, data)
    for dim, begin in enumerate(copy.begin):
        found = found.narrow(dim, begin, copy.place.shape[dim])
    copy.place.copy_(found)


def _shards(like: Any) -> bool:
    """Whether a state has a DTensor."""
    return like is not None and any(is_sharded(value) for _, value in tensors_of(like))
