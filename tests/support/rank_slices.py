"""Ranks of a RankPool save with SlicePlanner, and load with stock DCP."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from iobench.integrations.dcp import SlicePlanner, StorageWriter


def _state(mesh: DeviceMesh, grid: DeviceMesh) -> dict[str, Any]:
    """The same values on every rank."""
    torch.manual_seed(7)
    return {
        "plain": {
            "large": torch.randn(3000, 333),
            "few_rows": torch.randn(3, 200_000),
            "one_row": torch.randn(1, 1, 300_001),
            "vector": torch.randn(500_000).to(torch.bfloat16),
            "transposed": torch.randn(700, 500).t(),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 5),
            "parameter": torch.nn.Parameter(torch.randn(1000, 100)),
        },
        "replicated": distribute_tensor(torch.randn(1000, 301), mesh, [Replicate()]),
        "sharded": distribute_tensor(torch.randn(1001, 30), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(30, 1003), mesh, [Shard(1)]),
        "hybrid": distribute_tensor(torch.randn(2001, 300), grid, [Replicate(), Shard(0)]),
        "step": 17,
        "names": ["a", "b"],
    }


def _zeroed(value: Any) -> Any:
    """The same structure without the values."""
    if isinstance(value, dict):
        return {key: _zeroed(part) for key, part in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def _differences(want: Any, have: Any, name: str = "") -> list[str]:
    """Names of the tensors and objects that are not equal."""
    if isinstance(want, dict):
        return [n for key in want for n in _differences(want[key], have[key], f"{name}.{key}")]
    if isinstance(want, torch.Tensor):
        want, have = (getattr(t, "_local_tensor", t).detach() for t in (want, have))
        return [] if torch.equal(want, have) else [name]
    return [] if want == have else [name]


def save_in_slices(size: int, directory: str) -> list[str]:
    """Save by stock DCP's writer, then by ours with other values and the same plan; load each.

    Returns the names of tensors and objects that differ after a load.
    """
    mesh, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    saved = _state(mesh, grid)
    planner = SlicePlanner(nodes=[0, 0, 1, 1], enable_plan_caching=True)
    wrong = []
    for step in range(2):
        saved["plain"]["large"] += step
        location = Path(directory) / f"step-{step}"
        if step:
            dcp.save(saved, storage_writer=StorageWriter(location, "odirect"), planner=planner)
        else:
            dcp.save(saved, checkpoint_id=location, planner=planner)
        loaded = _zeroed(saved)
        dcp.load(loaded, checkpoint_id=location)
        wrong += _differences(saved, loaded, f"step {step}")
    return wrong
