"""Pace: the number of training steps between two checkpoints, given or from measured times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from iobench.checkpoint.schedule import shortest_interval
from iobench.errors import OptionError
from iobench.stats.estimates import median
from iobench.train.arm import Arm
from iobench.train.block import timed_step, warm_up
from iobench.train.saver import saver_for
from iobench.train.trainer import Trainer

_PERSISTS = re.compile(r"([0-9]{1,9}(?:\.[0-9]+)?)xpersist")
_BUDGET = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A rule for the steps between two checkpoints. One of the three fields is given.

    `steps` is the number itself. `persists` is a number of persist times that the interval lasts.
    `budget` is a fraction of training time, for CheckFreq's rule: see `shortest_interval`.
    """

    steps: int | None = None
    persists: float | None = None
    budget: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `20`, `2xpersist` or `3.5%`. Raises OptionError for anything else."""
        if re.fullmatch("[0-9]{1,9}", text) and int(text):
            return cls(steps=int(text))
        if (found := _PERSISTS.fullmatch(text)) and float(found[1]):
            return cls(persists=float(found[1]))
        if (found := _BUDGET.fullmatch(text)) and 0 < float(found[1]) < 100:
            return cls(budget=float(found[1]) / 100)
        raise OptionError(
            f"--every {text:.40}: give a number of steps (20), so many persist times (2xpersist), "
            "or what checkpoints may cost (3.5%)"
        )

    def __str__(self) -> str:
        if self.steps is not None:
            return str(self.steps)
        return f"{self.persists:g}xpersist" if self.persists else f"{100 * (self.budget or 0):g}%"

    def steps_for(self, probe: StepTimes) -> int:
        """Return the steps between two checkpoints, from the times of `probe`; at least 1."""
        if self.steps is not None:
            return self.steps
        if self.persists is not None:
            return max(1, math.ceil(self.persists * probe.persist_s / max(probe.step_s, 1e-9)))
        assert self.budget is not None
        return shortest_interval(
            step_s=probe.step_s,
            stall_s=probe.stall_s,
            persist_s=probe.persist_s,
            budget=self.budget,
        )


def whole_intervals(steps: int, every: int) -> int:
    """Return at least `steps` steps, in which a whole interval follows every checkpoint.

    The first checkpoint is taken after the first step, so one step is added to the intervals.
    """
    return -(-steps // every) * every + 1


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
