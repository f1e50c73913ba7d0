"""Schedules: when to save, at a fixed interval or as often as a time budget allows."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import median

from iobench.checkpoint.save import Save
from iobench.errors import OptionError


def shortest_interval(*, step_s: float, stall_s: float, persist_s: float, budget: float) -> int:
    """Return the fewest steps between checkpoints that CheckFreq's rule allows, 1 or more.

    A checkpoint must be written before the next one begins: `ceil(persist / step)`. Its stall must
    fit into the fraction `budget` of training time: `ceil(stall / (budget * step))`. (Mohan et al.,
    "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST '21, section 4.3.)
    """
    step_s = max(step_s, 1e-9)
    return max(math.ceil(persist_s / step_s), math.ceil(stall_s / (budget * step_s)), 1)


class Schedule(ABC):
    """Decides when a checkpoint is due. The Checkpointer reports each save to it."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to save after `step`. Call it once after every step."""

    @abstractmethod
    def started(self, save: Save) -> None:
        """Record that `save` began and stalled the trainer for `save.stall_s`.

        The background may still change its `status` and `persist_s`.
        """


class Every(Schedule):
    """After every `steps` steps: with 20 after the steps 19, 39, ... counted from 0."""

    def __init__(self, steps: int) -> None:
        if type(steps) is not int or steps < 1:
            raise OptionError(f"Every({steps!r}): a whole number, 1 or more")
        self.steps = steps
        self._last: int | None = None

    def due(self, step: int) -> bool:
        if self._last is None:
            self._last = step - 1
        return step - self._last >= self.steps

    def started(self, save: Save) -> None:
        self._last = save.step


class Auto(Schedule):
    """As often as the fraction `budget` of training time allows, by CheckFreq's rule.

    The first `warmup_steps` steps measure the step time. Then one checkpoint measures stall and
    persist time, which give `shortest_interval`. A background write slows the steps of an
    interval; whenever they take longer than the budget allows, the interval grows by 2.
    """

    def __init__(
        self,
        budget: float = 0.035,
        *,
        warmup_steps: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < budget < 1:
            raise OptionError(f"Auto(budget={budget}): a fraction between 0 and 1, such as 0.035")
        if warmup_steps < 2:
            raise OptionError(f"Auto(warmup_steps={warmup_steps}): at least 2")
        self.budget, self.warmup_steps = budget, warmup_steps
        self.interval: int | None = None
        """Steps between checkpoints; None until the first checkpoint is measured."""
        self._clock = clock
        self._asked_s: float | None = None
        self._steps_s: list[float] = []
        self._since_s = 0.0
        self._since_steps = 0
        self._last: Save | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step without a checkpoint: the median of the warm-up steps."""
        return median(self._steps_s)

    def due(self, step: int) -> bool:  # noqa: ARG002 -- counts its own calls
        now_s = self._clock()
        if self._asked_s is not None:
            self._stepped(now_s - self._asked_s)
        self._asked_s = now_s
        if len(self._steps_s) < self.warmup_steps:
            return False
        self._learn()
        if self.interval is not None:
            return self._since_steps >= self.interval
        return self._last is None or not self._last.on_the_way

    def started(self, save: Save) -> None:
        if self.interval is not None:
            self._adjust(self.interval)
        self._since_s, self._since_steps = 0.0, 0
        self._last = save

    def _stepped(self, elapsed_s: float) -> None:
        """Record a step that ended `elapsed_s` after the last one, stalls included."""
        if len(self._steps_s) < self.warmup_steps:
            self._steps_s.append(elapsed_s)
        self._since_s += elapsed_s
        self._since_steps += 1

    def _learn(self) -> None:
        """Set the interval once the first checkpoint is committed."""
        if self.interval is None and self._last and self._last.status == "committed":
            self.interval = shortest_interval(
                step_s=self.step_s,
                stall_s=self._last.stall_s,
                persist_s=self._last.persist_s or 0.0,
                budget=self.budget,
            )

    def _adjust(self, interval: int) -> None:
        plain_s = self.step_s * self._since_steps
        if plain_s and (self._since_s - plain_s) / plain_s > self.budget:
            self.interval = interval + 2
