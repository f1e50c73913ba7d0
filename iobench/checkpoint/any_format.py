"""Reads one checkpoint, whether one process or several ranks saved it, for any number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from iobench.checkpoint.checksums import read_compared, read_file
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.piece_reader import PieceReader
from iobench.checkpoint.ranked.structure import StatePath, local_box, name_of, stock_paths
from iobench.checkpoint.serialized import FORMAT, SKELETON, TENSORS
from iobench.checkpoint.state_tree import readable, unflatten
from iobench.checkpoint.stored import (
    StoredChunk,
    StoredPiece,
    StoredState,
    StoredTensor,
    compare_state,
    compared_with,
    empty_local,
    is_sharded,
    resharded,
    sharded_like,
    stored_state,
    tensors_of,
)
from iobench.errors import DataMismatchError, StateMismatchError
from iobench.formats import safetensors
from iobench.formats.collector import collector_paused
from iobench.formats.tensors import tensor_from_bytes
from iobench.ranks.together import JobRanks
from iobench.units import MIB
from iobench.writers.base import CopyReader
from iobench.writers.image import Bytes
from iobench.writers.transfer import Transfer

__all__ = ["WantedTensor", "disjoint", "paths_elsewhere", "read_any", "read_pieces", "without"]


def paths_elsewhere(ranks: JobRanks, like: Any) -> frozenset[StatePath]:
    """Return the paths of the tensors in the `like` of other ranks, as far as they differ.

    All ranks call it. Ranks with equal paths send them once.
    """

    def own() -> list[StatePath] | None:
        return None if like is None else [path for path, _ in tensors_of(like)]

    paths, digests = ranks.together("keys of like", own, _digest)
    if len(set(digests)) == 1:
        return frozenset()
    first = digests.index(digests[ranks.world.rank]) == ranks.world.rank
    every = ranks.agreed("tensors of like", lambda: (paths if first else None) or [])
    return frozenset(tuple(path) for one in every for path in one).difference(paths or ())


def _digest(paths: list[StatePath] | None) -> str | None:
    if paths is None:
        return None
    return hashlib.sha256(json.dumps(sorted(map(list, paths), key=str)).encode()).hexdigest()


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


def read_pieces(
    copy: CopyReader,
    where: str,
    stored: StoredState,
    like: Any,
    *,
    rank: int,
    ranks: int,
    reader: PieceReader,
    elsewhere: Collection[StatePath] = (),
) -> tuple[Any, Transfer]:
    """Return the state for `rank` of `ranks`; see `read_any`. `reader` fetches the pieces.

    Only the pieces are read of which this rank needs a part: that of the DTensors in `like`, and
    all of the other tensors. A large piece that is a whole tensor stays where it was read.
    """
    with readable(where):
        skeleton = _selected(stored.skeleton, rank, ranks)
        listed = stock_paths(skeleton, range(stored.world_size))
        names = dict.fromkeys(name for _, name in listed)
        if lacking := names.keys() - stored.tensors.keys():
            raise DataMismatchError(f"lacks the tensor {min(lacking)}")
    sharded, gone = compared_with(like, stored, where, elsewhere)
    needed = {name for path, name in listed if path not in gone}
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
        state = unflatten(skeleton, tensors, rank=rank, ranks=ranks)
        return without(state, like, gone, where), transfer


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


def read_any(
    copy: CopyReader,
    where: str,
    manifest: Manifest,
    like: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    reader: PieceReader,
    elsewhere: Collection[StatePath] = (),
) -> tuple[Any, Transfer]:
    """Return the state for `rank` of `ranks`, and the transfer of its tensors.

    `copy` reads the files, which `manifest` describes; messages name `where`. `reader` fetches the
    pieces that this rank needs. A checkpoint of one process is read as one file by a rank that is
    alone, and where tensors share memory in parts, as a slice and its base. `elsewhere` are the
    paths of tensors that only the `like` of other ranks has: this rank does not get them. Every
    byte that is used is compared with its checksum. Raises what `restore` raises.
    """
    if manifest.format == "dcp" or (manifest.format == FORMAT and (ranks > 1 or _shards(like))):
        stored = stored_state(copy, manifest)
        if not stored.has_views:
            return read_pieces(
                copy,
                where,
                stored,
                like,
                rank=rank,
                ranks=ranks,
                reader=reader,
                elsewhere=elsewhere,
            )

    def own_part(state: Any) -> Any:
        return without(state, like, elsewhere, where)

    state, transfer = _read_plain(copy, where, manifest, like, own_part, rank=rank, ranks=ranks)
    return state if like is None else resharded(state, like), transfer


def _shards(like: Any) -> bool:
    """Whether a state has a DTensor."""
    return like is not None and any(is_sharded(value) for _, value in tensors_of(like))


def _read_plain(
    copy: CopyReader,
    where: str,
    manifest: Manifest,
    like: Any,
    select: Callable[[Any], Any],
    *,
    rank: int,
    ranks: int,
) -> tuple[Any, Transfer]:
    """Return the state of the checkpoint that one process saved, and the transfer of its tensors.

    It is for `rank` of `ranks`, see `PerRank`. `select` returns the part of the state that is
    compared with `like` and returned.
    """
    if manifest.format != FORMAT:
        raise DataMismatchError(f"{where} has the unknown format {manifest.format!r}")
    text = read_file(copy, manifest.file(SKELETON))
    tensors, image = safetensors.prepare(TENSORS, copy.location, copy)
    with collector_paused():
        with readable(os.path.join(copy.location, SKELETON)):
            state = unflatten(_parsed(text), tensors, rank=rank, ranks=ranks)
        state = select(state)
    if like is not None:
        compare_state(like, state, where)
    return state, read_compared(copy, image, manifest.file(TENSORS))


def _parsed(text: bytes) -> Any:
    """Return the skeleton in `text`."""
    with suppress(ValueError, RecursionError):  # such as half of a surrogate pair
        return msgspec.json.decode(text)  # in half of the time of `json`
    return json.loads(text)
