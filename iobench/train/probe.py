"""StepTimes: the times of a step and a background save, measured before the first block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iobench.bench.judging.stats import median
from iobench.train.arm import Arm
from iobench.train.block import timed_step, warm_up
from iobench.train.saver import saver_for
from iobench.train.trainer import Trainer

__all__ = ["StepTimes", "probe"]

_TAKEN = 3


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians, in seconds. `step_s` is without a save in flight; `persist_s` is during steps."""

    step_s: float
    stall_s: float
    persist_s: float


def probe(trainer: Trainer, arm: Arm, directory: Path, simulated_s: float) -> StepTimes:
    """Train with 3 saves of `arm`, a background mode, each durable before the next begins.

    One more save before them allocates the memory. Leaves its last checkpoint in the new
    `directory`. Raises what the writer raises.
    """
    saver = saver_for(arm, directory)
    try:
        warm_up(trainer, saver)
        steps = [timed_step(trainer, saver, simulated_s)[1] for _ in range(_TAKEN)]
        for _ in range(_TAKEN):
            saver.save(trainer.state(), trainer.steps_done)
            timed_step(trainer, saver, simulated_s)
            while saver.persisting:
                timed_step(trainer, saver, simulated_s)
            saver.wait()
        saves = saver.saves()[1:]
        return StepTimes(
            step_s=median(steps),
            stall_s=median([one.stall_s for one in saves]),
            persist_s=median([one.persist_s for one in saves if one.persist_s is not None]),
        )
    finally:
        saver.close()
