"""Goodput: ETTR, and the work that a failure costs.

ETTR, the effective training time ratio, is the part of wall-clock time spent in steps that no
failure undoes. All times are seconds. Intervals are those of `intervals`: training time only, and
never below `intervals.shortest`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from iobench.goodput import intervals
from iobench.goodput.costs import Costs
from iobench.goodput.failures import integral
from iobench.goodput.job import TrainingJob

__all__ = ["best_interval_s", "ettr", "first_order_ettr", "lost_work_s"]

_GRID = [2 ** (step / 2) for step in range(-8, 21)]  # factors of the interval at a constant rate
_GOLDEN = (math.sqrt(5) - 1) / 2
_GOLDEN_STEPS = 34  # of the search, to 1e-7 of the grid's spacing


def ettr(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return `t / M` times the sum of `S(P + R + n (t + b))` over n = 1, 2, ..., exact.

    t is the interval, b the blocking time, P the persist time, R restart and restore, M the MTBF
    and S(x) the probability of no failure within x. The n-th checkpoint after a failure counts if
    no failure comes until it is durable. Work per time between failures is the ETTR (renewal reward
    theorem). For failures without memory it is `t e^(-(P + R) / M) / (M (e^((t + b) / M) - 1))`.
    With P = 0 that is work over wall-clock time in Daly's complete model (2006, section 4), with
    failures during saves and restarts. A failure loses the saves in flight, so P counts like R.
    Raises ValueError for an interval at which saves would wait for a slot.
    """
    _check(interval_s, costs)
    return interval_s / job.mtbf_s * _durable(interval_s, costs, job)


@functools.lru_cache(maxsize=4096)
def best_interval_s(costs: Costs, job: TrainingJob) -> float:
    """Return the interval that maximises `ettr`, where no save waits for a slot.

    For failures without memory it is `intervals.optimal`, the solution of an equation. There is no
    such equation for other shapes: the best point of a grid around that solution is refined by
    golden section search.
    """
    least_s = intervals.shortest(costs)
    constant_s = max(intervals.optimal(costs.blocking_s, job.mtbf_s), least_s)
    if job.failure_shape == 1 or costs.blocking_s == 0:
        return constant_s

    def value(interval_s: float) -> float:
        return ettr(interval_s, costs, job)

    points = sorted({max(constant_s * factor, least_s) for factor in _GRID})
    at = max(range(len(points)), key=lambda index: value(points[index]))
    if value(points[at]) == 0:
        return constant_s
    found_s = _golden_section(value, points[max(at - 1, 0)], points[min(at + 1, len(points) - 1)])
    return max((points[at], found_s), key=value)


def _golden_section(value: Callable[[float], float], low: float, high: float) -> float:
    """Return where `value` has its maximum between `low` and `high`; J. Kiefer, 1953."""
    inner, outer = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_inner, at_outer = value(inner), value(outer)
    for _ in range(_GOLDEN_STEPS):
        if at_inner > at_outer:
            high, outer, at_outer = outer, inner, at_inner
            inner = high - _GOLDEN * (high - low)
            at_inner = value(inner)
        else:
            low, inner, at_inner = inner, outer, at_outer
            outer = low + _GOLDEN * (high - low)
            at_outer = value(outer)
    return (low + high) / 2


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
    `t / (t + b) (t / 2 + b + P)` where that is far below the MTBF. 0 if the job
    never runs: recovery is longer than any time between failures.
    """
    _check(interval_s, costs)
    mtbf, period = job.mtbf_s, interval_s + costs.blocking_s
    if job.failure_shape == 1:
        cycle = -math.expm1(-period / mtbf)
        done = -mtbf * math.expm1(-interval_s / mtbf) / cycle
        kept = interval_s * math.exp(-(costs.persist_s + period) / mtbf) / cycle
        return done - kept
    failures, recovery = job.failures, job.restart_s + costs.restore_s
    runs = float(failures.survival(np.array([recovery]))[0])
    if runs == 0:
        return 0.0
    # The job trains at x after a failure if x - R is in the first t of a period and none came.
    done = integral(
        lambda at: np.array([failures.summed(float(one), period) for one in at]),
        recovery,
        recovery + interval_s,
    )
    return (done - interval_s * _durable(interval_s, costs, job)) / runs


def _durable(interval_s: float, costs: Costs, job: TrainingJob) -> float:
    """Return the mean number of checkpoints that become durable between two failures."""
    period_s = interval_s + costs.blocking_s
    first_s = costs.persist_s + job.restart_s + costs.restore_s + period_s
    return job.failures.summed(first_s, period_s)


def _check(interval_s: float, costs: Costs) -> None:
    least = intervals.shortest(costs)
    if not interval_s >= least * (1 - 1e-9):
        raise ValueError(f"at intervals of {interval_s} s saves wait for slots: {least} s is least")
