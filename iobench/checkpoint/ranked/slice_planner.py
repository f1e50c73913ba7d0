"""CutPlanner: replicated tensors are saved once, cut over the ranks that hold them."""

from __future__ import annotations

import dataclasses
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


BLOCK_SIZE = 8 * MIB


class CutPlanner(DefaultSavePlanner):
    """Cuts what several ranks hold over these ranks, in the plan of all of them.

    SlicePlanner of iobench.integrations.dcp, which plans whole saves of stock DCP, has the options.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[int] | None = None,
        block_size: int = BLOCK_SIZE,
        writers_per_node: int | None = None,
        **stock: Any,
    ) -> None:
        super().__init__(**stock)
        self._nodes = nodes
        self._block_size = block_size
        self._writers_per_node = writers_per_node

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
        steps = [cut_bytes(chunk_of(item).sizes, _itemsize(item), align) for item in items]
        found = slices(sizes, nodes, align=steps, writers_per_node=self._writers_per_node)
        return [[part for r in ranges for part in _parts(items[r.item], r)] for ranges in found]


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
    chunk, itemsize = chunk_of(item), _itemsize(item)
    found = []
    for offsets, sizes in boxes(chunk.sizes, part.start // itemsize, part.stop // itemsize):
        at = torch.Size(o + inner for o, inner in zip(chunk.offsets, offsets, strict=True))
        data = dataclasses.replace(
            item.tensor_data, chunk=ChunkStorageMetadata(offsets=at, sizes=torch.Size(sizes))
        )
        index = MetadataIndex(item.index.fqn, at)
        found.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return found


def chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return itemsize


def _size_bytes(item: WriteItem) -> int:
    return prod(chunk_of(item).sizes) * _itemsize(item)
