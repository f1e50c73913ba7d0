"""Costs: the seconds that one checkpoint costs a training job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iobench.errors import OptionError

__all__ = ["Costs"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of one checkpoint: a part that blocks training, and a part during training.

    A synchronous save blocks until it is durable: `persist_s` is 0. An asynchronous save blocks for
    the snapshot and is durable `persist_s` later. It holds one of `slots` snapshots until then. A
    save that finds no free slot waits. The persist time is that with `slots` saves in flight.
    Raises OptionError for a value out of range.
    """

    blocking_s: float
    restore_s: float
    persist_s: float = 0.0
    slots: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("blocking", self.blocking_s),
            ("restore", self.restore_s),
            ("persist", self.persist_s),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"{name} must be zero or more seconds, and is {value}")
        if not self.blocking_s + self.persist_s > 0:
            raise OptionError("a checkpoint must take time: give a save or persist above zero")
        if self.slots < 1:
            raise OptionError(f"slots must be 1 or more, and is {self.slots}")

    @property
    def asynchronous(self) -> bool:
        """Whether part of the save runs during training."""
        return self.persist_s > 0
