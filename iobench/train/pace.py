"""Pace: the number of training steps between two checkpoints, given or from measured times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from iobench.checkpoint.schedule import shortest_interval
from iobench.errors import OptionError
from iobench.train.probe import StepTimes

__all__ = ["Pace", "whole_intervals"]

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
            f"--every {text:.40}: a number of steps (20), so many persist times (2xpersist), or "
            "what checkpoints may cost (3.5%)"
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
