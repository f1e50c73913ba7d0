"""fsdp-dcp against torch's own checkpoint code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from iobench.workloads import Workload


@pytest.mark.parametrize(
    ("fields", "dtypes"),
    [
        ({}, {True: "float32", False: "float32"}),
        ({"precision": "bf16", "model_only": True}, {False: "bfloat16"}),
        # Weights and moments have the precision of the training; AdamW keeps its step in fp32.
        ({"precision": "bf16"}, {True: "float32", False: "bfloat16"}),
    ],
)
def test_one_rank_writes_the_file_that_torch_writes(
    small: Callable[..., Workload], tmp_path: Path, fields: dict[str, Any], dtypes: dict[bool, str]
) -> None:
    """The file of a single rank has exactly the size of the one that torch DCP writes; with
    `model_only` it has the weights alone."""
    workload = small("llama7b-fsdp", world_size=1, **fields)
    file = workload.files()[0]
    assert {tensor.name.endswith(".step"): tensor.dtype for tensor in file.tensors} == dtypes
    count = workload.model.num_tensors
    assert len(file.tensors) == (count if "model_only" in fields else 4 * count)
    state = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in file.tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about saving without a process group
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert file.exact
    assert (tmp_path / file.path).stat().st_size == file.size_bytes


def test_steps_go_round_the_ranks_as_torch_deals_them(small: Callable[..., Workload]) -> None:
    """Each rank gets the step scalars that dedup_save_plans leaves it: rank 0 none."""
    workload = small("llama7b-fsdp", world_size=4)
    files = [workload.files(rank)[0] for rank in range(4)]
    every_step = [t.name for f in files for t in f.tensors if t.name.endswith(".step")]
    order = {p.name: index for index, p in enumerate(workload.model.parameters())}
    every_step.sort(key=lambda name: order[name[len("optimizer.state.") : -len(".step")]])
    plans = []
    for rank, file in enumerate(files):
        shards = [t for t in file.tensors if not t.name.endswith(".step")]
        shards.sort(key=lambda tensor: tensor.name.startswith("optimizer"))
        items = [_item(t.name, (rank,), t.shape) for t in shards]
        plans.append(SavePlan(items + [_item(name, (), ()) for name in every_step]))
    for plan, file in zip(dedup_save_plans(plans), files, strict=True):
        assert {item.index.fqn for item in plan.items} == {t.name for t in file.tensors}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 96])
def test_parts_are_those_of_torch_chunk(small: Callable[..., Workload], ranks: int) -> None:
    """Each rank's part of a tensor is torch.chunk's, down to the ranks that get nothing."""
    workload = small("llama7b-fsdp", world_size=ranks)
    name, length = "model.embed_tokens.weight", 96
    parts = [
        next(t for t in workload.files(rank)[0].tensors if t.name == name).shape[0]
        for rank in range(ranks)
    ]
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(ranks)]
    assert parts == chunks + [0] * (ranks - len(chunks))


def _item(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> WriteItem:
    size = torch.Size(shape)
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offset)),
        type=WriteItemType.SHARD if offset else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=Chunk(offsets=torch.Size(offset), sizes=size),
            properties=TensorProperties(dtype=torch.float32),
            size=size,
        ),
    )
