"""DCP's plan of one rank as JSON: the ranks exchange plans, and never unpickle."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from iobench.formats.tensors import dtype_name, torch_dtype

__all__ = ["read_plan", "write_plan"]


def write_plan(plan: SavePlan) -> list[Any]:
    """Return the tensors of `plan` as JSON."""
    return [_row(item) for item in plan.items]


def _row(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None  # only tensors are planned
    return [
        item.index.fqn,
        item.type.name,
        dtype_name(data.properties.dtype),
        list(data.size),
        list(data.chunk.offsets),
        list(data.chunk.sizes),
    ]


def read_plan(rows: list[Any]) -> SavePlan:
    """Return the plan that `write_plan` described."""
    return SavePlan(items=[_item(*row) for row in rows], planner_data={})


def _item(
    name: str, kind: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]
) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=torch_dtype(dtype)),
            size=torch.Size(shape),
        ),
    )
