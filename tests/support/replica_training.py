"""A rank that trains with a Checkpointer that replicates; see replica_rank for REPLICA_TEST."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch

from iobench import Checkpointer, Partner, PerRank, Xor
from iobench.dist.world import World

_SCHEMES: dict[str, type[Partner | Xor]] = {"partner": Partner, "xor": Xor}


def _tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _state(step: int, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    model = {f"layer{at}": torch.randn(300, 500 + at, generator=generator) for at in range(4)}
    own = torch.randn(700_000, generator=generator.manual_seed(1000 * step + rank))
    return {"model": model, "own": PerRank({"tensor": own, "rank": rank}), "step": step}


def _equal(state: dict[str, Any], step: int, rank: int) -> bool:
    expected = _state(step, rank)
    own = expected["own"].value
    return (
        all(torch.equal(state["model"][name], one) for name, one in expected["model"].items())
        and torch.equal(state["own"]["tensor"], own["tensor"])
        and (state["own"]["rank"], state["step"]) == (rank, step)
    )


def main() -> None:
    """Run the scenario."""
    asked = json.loads(os.environ["REPLICA_TEST"])
    world = World.detect()
    os.environ["IOBENCH_AGENTS"] = f"{asked['base']}/{asked['hosts'][world.node]}"
    torch.set_num_threads(1)
    scheme = _SCHEMES[asked["scheme"]](rate="1GiB", **asked["options"])
    limit = asked.get("bandwidth_limit")
    ckpt = Checkpointer(
        asked["location"],
        writer="buffered",
        replicate=scheme,
        bandwidth_limit=limit,
        deadline_s=60,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if asked.get("load", True):
            state = ckpt.load("latest")
            assert ckpt.loaded is not None
            _tell(
                loaded=ckpt.loaded.step,
                equal=_equal(state, ckpt.loaded.step, world.rank),
                paths=sorted(ckpt.loaded.transfer.paths),
                told=[str(one.message) for one in told],
            )
    for step in asked["steps"]:
        ckpt.save_async(_state(step, world.rank), step)
        while not (ckpt.replicas and ckpt.replicas[-1].step == step):
            time.sleep(0.01)
        if limit is None:
            ckpt.wait()
        _tell(step=step, outcome=ckpt.replicas[-1].outcome, reason=ckpt.replicas[-1].reason)
    if asked["end"] == "wait":
        signal.pause()
    ckpt.close()
    _tell(ended=True)
