"""A rank of a job that replicates: loads, saves some steps, and then ends or waits for its death.

REPLICA_TEST is a JSON object: `base` and `hosts` (the runtime directory of each node), `steps`,
`options` of Partner, and `end` ("finish" or "wait").
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

import numpy as np

from iobench.ranks.control import Control
from iobench.ranks.world import World
from iobench.replicas.partner import Partner
from iobench.replicas.protocol import Version, recovery_plan
from iobench.replicas.replicator import Replicator
from iobench.writers.image import Bytes, FileImage


def _tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _state(step: int, rank: int) -> Bytes:
    size = 3_000_000 + 100_000 * rank
    return np.random.default_rng([step, rank]).integers(0, 256, size, np.uint8)


def _load(replicator: Replicator, world: World) -> Version | None:
    plan = recovery_plan(replicator.copies())
    if plan is None:
        _tell(loaded=None)
        return None
    expected = _state(plan.version.step, world.rank)
    memory = np.zeros_like(expected)
    found = replicator.fetch(plan, world.rank, 0, memory)
    equal = bool(np.array_equal(memory, expected))
    _tell(loaded=plan.version.step, equal=equal, read=found.read_bytes, notes=found.notes)
    return plan.version


def main() -> None:
    """Run the scenario."""
    asked = json.loads(os.environ["REPLICA_TEST"])
    world = World.detect()
    control = Control.connect(world, deadline_s=60, lost_after_s=10)
    # From here on each rank is on a node of its own; to meet they need one directory.
    os.environ["IOBENCH_AGENTS"] = f"{asked['base']}/{asked['hosts'][world.node]}"
    options = {"rate": "1GiB", **asked.get("options", {})}
    replicator = Replicator(Partner(**options), control, "/runs/a")
    version = _load(replicator, world)
    replicator.resumed(version)
    serial = version.serial if version else 0
    for step in asked["steps"]:
        serial += 1
        image = FileImage.of("state", [_state(step, world.rank)])
        replicator.offer(Version(serial, step, world.job), image).wait()
        replicator.wait()
        last = replicator.replicas[-1]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            replicator.warn()
        _tell(
            step=last.step,
            outcome=last.outcome,
            reason=last.reason,
            told=[str(one.message) for one in told],
        )
    if asked["end"] == "wait":
        signal.pause()
    replicator.close(finished=asked["end"] == "finish")
    control.close()
    _tell(ended=True)
