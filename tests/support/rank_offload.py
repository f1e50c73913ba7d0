"""Trainings with offloaded state in the ranks of a RankPool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from iobench.offload.ranked import ShardedAdamW
from support.kill_points import arm
from tests.support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters
from tests.support.rank_pool import in_world, mesh_of

__all__ = ["bits", "train"]


def bits(parameters: Any) -> list[list[int]]:
    """The bytes of each parameter."""
    return [p.detach().view(-1).view(torch.uint8).tolist() for p in parameters]


def train(
    size: int,
    directory: str,
    steps: int,
    pins: list[int],
    resume: int | str | None = None,
    engine: str = "thread",
    kill: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """Train until there are `steps` updates; `kill` is a rank and a point in it."""
    torch.set_num_threads(1)
    world = in_world(size)
    common: dict[str, Any] = {
        "world": world,
        "group": mesh_of(size).get_group() if size > 1 else None,
        "deadline_s": 60,
    }
    if kill is not None and kill[0] == world.rank:
        arm(kill[1])
    if resume is None:
        parameters = make_parameters()
        optimizer = ShardedAdamW(
            parameters, directory, **VALUES, **OPTIONS, **common, engine=engine
        )
    else:
        parameters = make_parameters(9)
        chosen: Any = resume
        memory: Any = OPTIONS["memory"]
        optimizer = ShardedAdamW.resume(
            parameters, directory, step=chosen, memory=memory, engine=engine, **common
        )
    with optimizer:
        begun = bits(parameters)
        for step in range(optimizer.updates, steps):
            give_gradients(parameters, step)
            optimizer.step()
            if step + 1 in pins:
                optimizer.pin(step + 1, {"rank": world.rank})
        optimizer.wait()
        return {
            "begun": begun,
            "bits": bits(parameters),
            "updates": optimizer.updates,
            "durable": optimizer.durable(),
            "pinned": optimizer.pinned(),
            "lr": optimizer.param_groups[0]["lr"],
            "extra": optimizer.restored.extra if optimizer.restored else None,
            "files": sorted(path.name for path in Path(directory).iterdir()),
        }
