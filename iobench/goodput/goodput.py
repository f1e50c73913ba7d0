"""Goodput: ETTR, and the work that a failure costs.

ETTR, the effective training time ratio, is the part of wall-clock time spent in steps that no
failure undoes. All times are seconds. Intervals are training time between two saves, and never
below the persist time: there a save waits for the one before (CheckFreq, FAST 2021; PCcheck, ASPLOS
2025, has several in flight).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from iobench.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of one checkpoint: a part that blocks training, and a part during training.

    A synchronous save blocks until it is durable: `persist_s` is 0. An asynchronous save blocks for
    the snapshot and is durable `persist_s` later. The next save waits until then. Raises
    OptionError for a value out of range.
    """

    blocking_s: float
    restore_s: float
    persist_s: float = 0.0

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

    @property
    def asynchronous(self) -> bool:
        """Whether part of the save runs during training."""
        return self.persist_s > 0


DAY_S = 86_400.0
_FEWEST_FAILURES, _MOST_FAILURES = 1e-12, 1e12  # beyond them the formulas overflow
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
        for name, value in (("nodes", self.nodes), ("gpus-per-node", self.gpus_per_node)):
            if value < 1:
                raise OptionError(f"{name} must be 1 or more, and is {value}")
        rate = self.failures_per_1000_node_days
        if not _FEWEST_FAILURES <= rate <= _MOST_FAILURES:
            raise OptionError(
                f"failures-per-1000-node-days must be from {_FEWEST_FAILURES:g} to "
                f"{_MOST_FAILURES:g}, and is {rate}"
            )
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


_MOST_STEPS = 200  # of Newton's method; fewer than 10 are usual


def ettr(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return `t e^(-(P + R) / M) / (M (e^((t + b) / M) - 1))`, exact.

    t is the interval, b the blocking time, P the persist time, R restart and restore, M the MTBF.
    The n-th checkpoint after a failure counts if no failure comes until it is durable, which has
    the probability `e^(-(P + R + n (t + b)) / M)`. Their sum is the work per time between failures,
    and that is the ETTR (renewal reward theorem). With P = 0 it is work over wall-clock time in
    Daly's complete model (2006, section 4), with failures during saves and restarts. A failure
    loses the saves in flight, so P counts like R. Raises ValueError for an interval at which saves
    would wait for the one before.
    """
    _check(interval_s, costs)
    if interval_s == 0:
        return 0.0
    mtbf, period = job.mtbf_s, interval_s + costs.blocking_s
    first = costs.persist_s + job.restart_s + costs.restore_s + period
    return interval_s / mtbf * math.exp(-first / mtbf) / -math.expm1(-period / mtbf)


def best_interval_s(costs: Costs, job: TrainingJob) -> float:
    """Return the interval that maximises `ettr`, where no save waits."""
    return max(optimal(costs.blocking_s, job.mtbf_s), costs.persist_s)


def lost_work_s(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return the exact mean training time that a failure of the running job undoes.

    It is the work since the start less the work in the last durable checkpoint. It is about
    `t / (t + b) (t / 2 + b + P)` where that is far below the MTBF.
    """
    _check(interval_s, costs)
    mtbf, period = job.mtbf_s, interval_s + costs.blocking_s
    cycle = -math.expm1(-period / mtbf)
    done = -mtbf * math.expm1(-interval_s / mtbf) / cycle
    kept = interval_s * math.exp(-(costs.persist_s + period) / mtbf) / cycle
    return done - kept


def _check(interval_s: float, costs: Costs) -> None:
    least = costs.persist_s
    if not interval_s >= least * (1 - 1e-9):
        raise ValueError(
            f"at intervals of {interval_s} s saves wait for each other: {least} s is least"
        )


def optimal(save_s: float, mtbf_s: float) -> float:
    """Return the interval that maximises `ettr`, to the last digits.

    It solves the equation that the formulas of Young (CACM 17(9), 1974) and Daly (FGCS 22(3), 2006)
    approximate: `(1 - t / M) e^((t + d) / M) = 1` for a save of d and an MTBF of M. With
    t = M (1 - e^-s) this is `s + e^-s - 1 = d / M`. It is convex in s, so Newton's method always
    converges. Recovery time and persist time do not move this interval.
    """
    target = save_s / mtbf_s
    s = math.sqrt(2 * target) + target
    for _ in range(_MOST_STEPS):
        if s == 0:
            return 0.0
        step = (s + math.expm1(-s) - target) / -math.expm1(-s)
        s -= step
        if abs(step) <= 1e-13 * s:
            break
    return -mtbf_s * math.expm1(-s)
