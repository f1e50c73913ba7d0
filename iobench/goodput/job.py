"""TrainingJob: its size, its failure rate, and its restart time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iobench.errors import OptionError


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


DAY_S = 86_400.0
MONTH_S = 30 * DAY_S


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A job on `nodes` nodes that stops as a whole when one of them fails.

    MTBF = 1 / (nodes x failures per node-day), arXiv 2410.21680, section III. There, 6.50 failures
    per 1000 node-days give 1.8 h for 16,384 GPUs, 8 to a node. Failures are independent and
    memoryless, a Poisson process. `restart_s` is the time from the failure until the job can read
    its checkpoint: detection, scheduling, start. Raises OptionError for a value out of range.
    """

    nodes: int
    gpus_per_node: int = 8
    failures_per_1000_node_days: float = 6.5
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        _at_least("nodes", self.nodes, 1)
        _at_least("gpus-per-node", self.gpus_per_node, 1)
        rate = self.failures_per_1000_node_days
        if not (math.isfinite(rate) and rate > 0):
            raise OptionError(f"failures-per-1000-node-days must be above zero, and is {rate}")
        if not (math.isfinite(self.restart_s) and self.restart_s >= 0):
            raise OptionError(f"restart must be zero or more seconds, and is {self.restart_s}")

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole job, seconds."""
        return DAY_S / (self.nodes * self.failures_per_1000_node_days / 1000)

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.nodes * self.gpus_per_node


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionError(f"{name} must be {least} or more, and is {value}")
