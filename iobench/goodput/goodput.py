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

__all__ = ["ettr", "first_order_ettr", "lost_work_s"]


def ettr(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return `t e^(-(P + R) / M) / (M (e^((t + b) / M) - 1))`, exact for memoryless failures.

    t is the interval, b the blocking time, P the persist time, R restart and restore, M the MTBF.
    For P = 0 it is work over wall-clock time in Daly's complete model (2006, section 4), with
    failures during saves and restarts. A failure loses the saves in flight, so P counts like R.
    Raises ValueError for an interval at which saves would wait for a slot.
    """
    _check(interval_s, costs)
    mtbf, period = job.mtbf_s, interval_s + costs.blocking_s
    lost = (costs.persist_s + job.restart_s + costs.restore_s) / mtbf
    useful = interval_s / mtbf / -math.expm1(-period / mtbf)
    return useful * math.exp(-lost - period / mtbf)


def first_order_ettr(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return `(1 - (R + P + t / 2) / M) / (1 + b / t)`, never below 0.

    arXiv 2410.21680 (Kokolis and others, Revisiting reliability in large-scale machine learning
    research clusters), where R is u0, t is dt, b is w and 1 / M is N r_f; P is zero there. Holds
    while R + P + t is far below M: it counts at most one failure per interval.
    """
    _check(interval_s, costs)
    recovery = job.restart_s + costs.restore_s + costs.persist_s
    running = 1 - (recovery + interval_s / 2) / job.mtbf_s
    return max(running, 0.0) * interval_s / (interval_s + costs.blocking_s)


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
