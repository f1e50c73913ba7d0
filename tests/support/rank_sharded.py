"""Ranks of a RankPool load their parts of a safetensors model."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate, Shard

from iobench.exports.sharded import load_sharded
from iobench.writers.registry import make
from tests.support.rank_pool import in_world, mesh_of

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((1024, 520), torch.bfloat16),
    "columns": ((520, 1030), torch.float32),
    "experts": ((3, 700, 1024), torch.bfloat16),
    "replicated": ((1000, 300), torch.float16),
    "uneven": ((7, 33), torch.float64),
    "whole": ((400, 1000), torch.float32),
    "meta": ((11,), torch.int64),
    "steps": ((100, 100), torch.int32),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
}


def _like(size: int, rank: int) -> dict[str, Any]:
    """What the rank wants: DTensors with and without memory, tensors, and slices of all kinds."""
    mesh = mesh_of(size)

    def sharded(name: str, *placements: Any, device: str) -> DTensor:
        shape, dtype = SHAPES[name]
        whole = torch.zeros(shape, dtype=dtype, device=device)
        place = placements[0]
        local = whole
        if isinstance(place, Shard):
            parts = torch.chunk(whole, size, place.dim)
            empty = whole.narrow(place.dim, 0, 0)
            local = parts[rank] if rank < len(parts) else empty
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    return {
        "rows": sharded("rows", Shard(0), device="cpu"),
        "columns": sharded("columns", Shard(1), device="meta"),
        "experts": sharded("experts", Shard(1), device="cpu"),
        "replicated": sharded("replicated", Replicate(), device="cpu"),
        "uneven": sharded("uneven", Shard(0), device="meta"),
        "whole": torch.zeros(SHAPES["whole"][0]),
        "meta": torch.zeros(11, dtype=torch.int64, device="meta"),
        "steps": (slice(rank, None, 7), slice(3, -4, 5)),
        "scalar": ...,
        "empty": slice(0, 0),
    }


def load(size: int, directory: str, mode: str, writer: str) -> Any:
    """Return the names that differ from the whole file, and the figures of the Transfer."""
    world = in_world(size)
    like = _like(size, world.rank)
    found, moved = load_sharded(directory, like, make(writer), restore_mode=mode, world=world)
    whole: dict[str, torch.Tensor] = {}
    for file in Path(directory).glob("*.safetensors"):
        whole |= load_file(file)
    wrong = []
    for name, value in like.items():
        mine, full = found[name], whole[name]
        if isinstance(value, DTensor):
            assert (mine.placements, mine.shape) == (value.placements, value.shape)
            place = value.placements[0]
            parts = (
                torch.chunk(full, size, place.dim) if isinstance(place, Shard) else [full] * size
            )
            want = parts[world.rank] if world.rank < len(parts) else full.narrow(0, 0, 0)
            mine = mine.to_local()
        elif isinstance(value, torch.Tensor):
            want = full
        else:
            want = full[value]
        same = mine.dtype == want.dtype and mine.is_contiguous() and not mine.is_meta
        if not same or not torch.equal(mine, want):
            wrong.append(name)
    return wrong, moved.bytes, moved.read_amplification, sorted(moved.paths)
