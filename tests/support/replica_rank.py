"""A rank of a job that replicates: loads, saves some steps, and then ends or waits for its death.

REPLICA_TEST is a JSON object: `base` and `hosts` (the runtime directory of each node), `steps`,
`options` of Partner, and `end` ("finish" or "wait").
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import numpy as np

from iobench import Checkpointer, Partner, PerRank
from iobench.ranks import control
from iobench.ranks.world import World
from iobench.writers.image import Bytes


def _tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _own(step: int, rank: int) -> Bytes:
    size = 3_000_000 + 100_000 * rank
    return np.random.default_rng([step, rank]).integers(0, 256, size, np.uint8)


def _load(ckpt: Checkpointer, rank: int) -> None:
    if not ckpt.latest():
        _tell(loaded=None)
        return
    state = ckpt.load()
    loaded = ckpt.loaded
    assert loaded is not None
    equal = bool(np.array_equal(state["own"], _own(loaded.step, rank)))
    paths = sorted(loaded.transfer.paths)
    _tell(loaded=loaded.step, equal=equal, sources=loaded.sources, paths=paths)


def _save(ckpt: Checkpointer, step: int, rank: int) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ckpt.save_async({"own": PerRank(_own(step, rank))}, step)
        while not any(one.step == step for one in ckpt.replicas):
            time.sleep(0.01)
        ckpt.wait()
    last = ckpt.replicas[-1]
    _tell(
        step=last.step,
        outcome=last.outcome,
        reason=last.reason,
        told=[str(one.message) for one in told],
    )


def main() -> None:
    """Run the scenario."""
    asked = json.loads(os.environ["REPLICA_TEST"])
    world = World.detect()
    control._shared = control.Control.connect(world, deadline_s=60, lost_after_s=10)
    # From here on each rank is on a node of its own; to meet they need one directory.
    os.environ["IOBENCH_RUNTIME"] = f"{asked['base']}/{asked['hosts'][world.node]}"
    options = {"rate": "1GiB", **asked.get("options", {})}
    warnings.simplefilter("ignore")
    ckpt = Checkpointer(f"{asked['base']}/run", replicate=Partner(**options), writer="buffered")
    _load(ckpt, world.rank)
    for step in asked["steps"]:
        _save(ckpt, step, world.rank)
    if asked["end"] == "wait":
        signal.pause()
    ckpt.close()
    _tell(ended=True)
