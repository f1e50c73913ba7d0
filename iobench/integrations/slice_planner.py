"""SlicePlanner: stock DCP saves replicated tensors once, cut over the ranks that hold them."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from iobench.checkpoint.ranked.plan import BLOCK_SIZE, CutPlanner, chunk_of

__all__ = ["SlicePlanner"]


class SlicePlanner(CutPlanner):
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
        block_size: int = BLOCK_SIZE,
        writers_per_node: int | None = None,
        **stock: Any,
    ) -> None:
        """`nodes[rank]`: the node of each rank; None for one node.

        `block_size`: the writer's block in bytes, to which parts are aligned as far as their sizes
        stay equal within 1%. `writers_per_node`: ranks of one node that write replicated state;
        None for all. `stock`: options of torch's DefaultSavePlanner.
        """
        super().__init__(
            nodes=nodes, block_size=block_size, writers_per_node=writers_per_node, **stock
        )
        self._own: dict[str, list[WriteItem]] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the plan of stock DCP, and note which parts of each tensor this rank holds."""
        plan = super().create_local_plan()
        own = defaultdict(list)
        for item in self.plan.items:  # `plan` is empty when it equals that of the last save
            own[item.index.fqn].append(item)
        self._own = own
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the bytes of an object, or the tensor to write: a view where it is a part."""
        whole = self._own_around(write_item)
        if whole is None:
            data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        tensor = self.lookup_object(whole.index).detach()
        return _part_of(tensor, chunk_of(whole), chunk_of(write_item))

    def _own_around(self, part: WriteItem) -> WriteItem | None:
        """Return the item of this rank that `part` was cut from; None if it is not a part."""
        if part.tensor_data is None:
            return None
        held = self._own[part.index.fqn]
        if any(chunk_of(item) == chunk_of(part) for item in held):
            return None
        return next(item for item in held if _contains(chunk_of(item), chunk_of(part)))


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
