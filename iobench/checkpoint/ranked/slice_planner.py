"""SlicePlanner: DCP saves replicated tensors once, cut over the ranks that hold them."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from iobench.errors import UsageError
from iobench.ranks.restore_plan import Range, fitting_align, slices, writers_of
from iobench.units import MIB

__all__ = ["SlicePlanner", "boxes", "cut_bytes"]


class _Box(NamedTuple):
    """Elements [offset, offset + size) in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[_Box]:
    """Return the boxes of elements [start, stop) of a tensor of `shape`, in row-major order.

    They are disjoint and each is contiguous in memory. Rows that are whole form one box; a part of
    a row at either end adds boxes of the inner dimensions: 2 * len(shape) - 1 at most.
    """
    if start >= stop:
        return []
    if not shape:
        return [_Box((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all in one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    found = _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        inner = tuple(shape[1:])
        found.append(_Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[_Box]:
    return [
        _Box((row, *box.offsets), (1, *box.sizes))
        for box in boxes(shape[1:], start, stop)
        if start < stop
    ]


def cut_bytes(shape: Sequence[int], itemsize: int, align: int) -> int:
    """Return the step in bytes, at most `align`, at which a tensor is cut into the fewest boxes.

    It is a multiple of the largest inner block (a row, or the rows of an inner dimension) that is
    not larger than `align`. Never less than one element.
    """
    block = prod(shape) * itemsize
    for size in shape:
        if block <= align:
            break
        block //= size
    return max(block, align - align % block) if block else align


_BLOCK_SIZE = 8 * MIB


class SlicePlanner(DefaultSavePlanner):
    """Plans a save in which every byte that several ranks hold is written by one of them.

    Stock DCP gives a replicated tensor to one rank whole. Here each tensor, or shard of a DTensor,
    that several ranks list is cut by bytes over these ranks; the metadata lists the parts as
    chunks, so stock `dcp.load` and `FileSystemReader` read the result. Shards that one rank holds,
    objects, and tensors below 64 KiB are planned like in stock DCP. The coordinator cuts, from
    the plans that DCP gathers anyway: no other communication.

    Tensors of one name and shape must be equal on all ranks. Stock DCP keeps one rank's version of
    a tensor that differs; cut, it would be a mix. Give state of one rank a name of its own.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[int] | None = None,
        block_size: int = _BLOCK_SIZE,
        writers_per_node: int | None = None,
        **stock: Any,
    ) -> None:
        """`nodes[rank]`: the node of each rank; None for one node.

        `block_size`: the writer's block in bytes, to which parts are aligned as far as their sizes
        stay equal within 1%. `writers_per_node`: ranks of one node that write replicated state;
        None for all. `stock`: options of torch's DefaultSavePlanner.
        """
        super().__init__(**stock)
        self._nodes = nodes
        self._block_size = block_size
        self._writers_per_node = writers_per_node
        self._own: dict[str, list[WriteItem]] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the plan of stock DCP, and note which parts of each tensor this rank holds."""
        plan = super().create_local_plan()
        own = defaultdict(list)
        for item in self.plan.items:  # `plan` is empty when it equals that of the last save
            own[item.index.fqn].append(item)
        self._own = own
        return plan

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        nodes = self._nodes if self._nodes is not None else [0] * len(all_plans)
        if len(nodes) != len(all_plans):
            raise UsageError(f"nodes={list(nodes)}: {len(all_plans)} ranks save, list each")
        cut = [list[WriteItem]() for _ in all_plans]
        replicated = set[MetadataIndex]()
        for holders, items in _replicated(all_plans).items():
            found = self._cut(items, [nodes[rank] for rank in holders])
            for rank, parts in zip(holders, found, strict=True):
                cut[rank] += parts
            replicated.update(item.index for item in items)
        plans = [
            dataclasses.replace(
                plan, items=[*(i for i in plan.items if i.index not in replicated), *parts]
            )
            for plan, parts in zip(all_plans, cut, strict=True)
        ]
        deduplicated: list[SavePlan] = super()._dedup_save_plans(plans)
        return deduplicated

    def _cut(self, items: list[WriteItem], nodes: list[int]) -> list[list[WriteItem]]:
        """Return the parts of `items` that each of the ranks writes which hold all of them."""
        sizes = [_size_bytes(item) for item in items]
        writers = sum(map(len, writers_of(nodes, self._writers_per_node)))
        align = fitting_align(sum(sizes), writers, self._block_size)
        steps = [cut_bytes(_chunk(item).sizes, _itemsize(item), align) for item in items]
        found = slices(sizes, nodes, align=steps, writers_per_node=self._writers_per_node)
        return [[part for r in ranges for part in _parts(items[r.item], r)] for ranges in found]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the bytes of an object, or the tensor to write: a view where it is a part."""
        whole = self._own_around(write_item)
        if whole is None:
            data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        tensor = self.lookup_object(whole.index).detach()
        return _part_of(tensor, _chunk(whole), _chunk(write_item))

    def _own_around(self, part: WriteItem) -> WriteItem | None:
        """Return the item of this rank that `part` was cut from; None if it is not a part."""
        if part.tensor_data is None:
            return None
        held = self._own[part.index.fqn]
        if any(_chunk(item) == _chunk(part) for item in held):
            return None
        return next(item for item in held if _contains(_chunk(item), _chunk(part)))


def _replicated(plans: Sequence[SavePlan]) -> dict[tuple[int, ...], list[WriteItem]]:
    """Return the tensors that several ranks list, by these ranks, in the order of the first one.

    Left out, and with that to stock DCP: tensors without elements, tensors whose memory is not
    rows of elements, and those of which ranks list different shapes or types.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    first: dict[MetadataIndex, WriteItem] = {}
    differ = set[MetadataIndex]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is None or data.properties.layout != torch.strided or not _size_bytes(item):
                continue
            known = first.setdefault(item.index, item).tensor_data
            assert known is not None
            if (data.chunk, data.properties.dtype) != (known.chunk, known.properties.dtype):
                differ.add(item.index)
            holders[item.index].append(rank)
    groups: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for index, ranks in holders.items():
        if len(ranks) > 1 and index not in differ:
            groups[tuple(ranks)].append(first[index])
    return groups


def _parts(item: WriteItem, part: Range) -> list[WriteItem]:
    """Return the write items of a range of bytes of `item`: `item` itself for all of it."""
    if part.size_bytes == _size_bytes(item):
        return [item]
    assert item.tensor_data is not None
    chunk, itemsize = _chunk(item), _itemsize(item)
    found = []
    for offsets, sizes in boxes(chunk.sizes, part.start // itemsize, part.stop // itemsize):
        at = torch.Size(o + inner for o, inner in zip(chunk.offsets, offsets, strict=True))
        data = dataclasses.replace(
            item.tensor_data, chunk=ChunkStorageMetadata(offsets=at, sizes=torch.Size(sizes))
        )
        index = MetadataIndex(item.index.fqn, at)
        found.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return found


def _part_of(
    tensor: torch.Tensor, whole: ChunkStorageMetadata, part: ChunkStorageMetadata
) -> torch.Tensor:
    """Return the elements of `part` as a view of `tensor`, which has those of `whole`.

    A part that is contiguous in memory gets a storage of its size: serializers copy a tensor
    whose storage is larger.
    """
    view = tensor
    for dim, (at, begin, size) in enumerate(
        zip(part.offsets, whole.offsets, part.sizes, strict=True)
    ):
        view = view.narrow(dim, at - begin, size)
    if type(view) is not torch.Tensor or not view.is_contiguous():
        return view
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.nbytes]
    alone = torch.empty(0, dtype=view.dtype, device=view.device)
    return alone.set_(storage, 0, view.shape, view.stride())


def _contains(outer: ChunkStorageMetadata, inner: ChunkStorageMetadata) -> bool:
    return all(
        begin <= at and at + size <= begin + length
        for begin, length, at, size in zip(
            outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True
        )
    )


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return itemsize


def _size_bytes(item: WriteItem) -> int:
    return prod(_chunk(item).sizes) * _itemsize(item)
