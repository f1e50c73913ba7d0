"""Four ranks save with SlicePlanner and load with stock DCP. Arguments: a directory.

Prints the bytes that each rank wrote of each state, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from iobench.dist.slice_planner import SlicePlanner
from iobench.integrations.dcp import StorageWriter

RANKS = 4


def state(mesh: DeviceMesh, grid: DeviceMesh) -> dict[str, Any]:
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


def zeroed(value: Any) -> Any:
    """The same structure without the values."""
    if isinstance(value, dict):
        return {key: zeroed(part) for key, part in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def differences(want: Any, have: Any, name: str = "") -> list[str]:
    """Names of the tensors and objects that are not equal."""
    if isinstance(want, dict):
        return [n for key in want for n in differences(want[key], have[key], f"{name}.{key}")]
    if isinstance(want, torch.Tensor):
        want, have = (getattr(t, "_local_tensor", t).detach() for t in (want, have))
        return [] if torch.equal(want, have) else [name]
    return [] if want == have else [name]


def rank(number: int, directory: Path) -> None:
    """Save by stock DCP's writer, then by ours with other values and the same plan; load each."""
    store = dist.FileStore(str(directory / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    mesh, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    saved = state(mesh, grid)
    planner = SlicePlanner(nodes=[0, 0, 1, 1], enable_plan_caching=True)
    for step in range(2):
        saved["plain"]["large"] += step
        location = directory / f"step-{step}"
        if step:
            dcp.save(saved, storage_writer=StorageWriter(location, "odirect"), planner=planner)
        else:
            dcp.save(saved, checkpoint_id=location, planner=planner)
        loaded = zeroed(saved)
        dcp.load(loaded, checkpoint_id=location)
        wrong = differences(saved, loaded)
        if wrong:
            raise SystemExit(f"rank {number}, step {step}: {wrong} differ after the load")
    dist.barrier()
    if not number:
        files = sorted((directory / "step-1").glob("*.distcp"))
        sizes = [0] * RANKS
        for file in files:
            sizes[int(file.name.split("_")[2])] += file.stat().st_size
        print(json.dumps(sizes))
    dist.destroy_process_group()


def main(directory: Path) -> None:
    """Fork the ranks after the import of torch, which costs each 2 s otherwise."""
    torch.set_num_threads(1)
    children = []
    for number in range(RANKS):
        child = os.fork()
        if not child:
            rank(number, directory)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(failed))


main(Path(sys.argv[1]))
