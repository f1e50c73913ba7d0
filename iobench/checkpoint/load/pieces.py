"""read_pieces: the state of one rank from a checkpoint of any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from iobench.checkpoint.load.elsewhere import without
from iobench.checkpoint.load.like import compared_with, empty_local, local_box, sharded_like
from iobench.checkpoint.load.reader import PieceReader
from iobench.checkpoint.load.stored import StoredChunk, StoredPiece, StoredState, StoredTensor
from iobench.checkpoint.ranked.stock_values import StatePath, stock_paths
from iobench.checkpoint.rebuild import readable, unflatten
from iobench.errors import DataMismatchError
from iobench.formats.collector import collector_paused
from iobench.formats.tensors import tensor_from_bytes
from iobench.units import MIB
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import Bytes
from iobench.writers.transfer import Transfer

__all__ = ["disjoint", "read_pieces"]

_LARGE = MIB


@dataclass
class _Wanted:
    """The elements at `offsets` of a saved tensor, to be copied into `memory`."""

    memory: torch.Tensor
    offsets: tuple[int, ...]
    sharded: Any
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
    wanted: _Wanted

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
    reader: PieceReader | None = None,
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
    wanted: dict[str, _Wanted] = {}
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

    transfer = (reader or PieceReader()).read(copy, stored.files, list(copies), deliver)
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


def _wanted(saved: StoredTensor, sharded: Any) -> _Wanted:
    """Return what this rank needs of a tensor. Its memory has no pages yet."""
    if sharded is None:
        memory = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        return _Wanted(memory, (0,) * len(saved.shape), None)
    return _Wanted(empty_local(sharded), local_box(sharded)[1], sharded)


def _add_copies(
    name: str, saved: StoredTensor, wanted: _Wanted, copies: dict[StoredPiece, list[_Copy]]
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
