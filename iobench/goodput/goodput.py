"""Goodput: ETTR, and the work that a failure costs.

ETTR, the effective training time ratio, is the part of wall-clock time spent in steps that no
failure undoes. All times are seconds. Intervals are those of `intervals`: training time only, and
never below `intervals.shortest`.
"""

from __future__ import annotations

import math

from iobench.goodput import intervals
from iobench.goodput.costs import Costs
from iobench.goodput.job import TrainingJob

__all__ = ["best_interval_s", "ettr", "lost_work_s"]


def ettr(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return `t e^(-(P + R) / M) / (M (e^((t + b) / M) - 1))`, exact.

    t is the interval, b the blocking time, P the persist time, R restart and restore, M the MTBF.
    The n-th checkpoint after a failure counts if no failure comes until it is durable, which has
    the probability `e^(-(P + R + n (t + b)) / M)`. Their sum is the work per time between failures,
    and that is the ETTR (renewal reward theorem). With P = 0 it is work over wall-clock time in
    Daly's complete model (2006, section 4), with failures during saves and restarts. A failure
    loses the saves in flight, so P counts like R. Raises ValueError for an interval at which saves
    would wait for a slot.
    """
    _check(interval_s, costs)
    if interval_s == 0:
        return 0.0
    mtbf, period = job.mtbf_s, interval_s + costs.blocking_s
    first = costs.persist_s + job.restart_s + costs.restore_s + period
    return interval_s / mtbf * math.exp(-first / mtbf) / -math.expm1(-period / mtbf)


def best_interval_s(costs: Costs, job: TrainingJob) -> float:
    """Return the interval that maximises `ettr`, where no save waits for a slot."""
    return max(intervals.optimal(costs.blocking_s, job.mtbf_s), intervals.shortest(costs))


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
    least = intervals.shortest(costs)
    if not interval_s >= least * (1 - 1e-9):
        raise ValueError(f"at intervals of {interval_s} s saves wait for slots: {least} s is least")
