"""Goodput: ETTR, and the work that a failure costs.

ETTR, the effective training time ratio, is the part of wall-clock time spent in steps that no
failure undoes. All times are seconds. Intervals are those of `intervals`: training time only, and
never below `intervals.shortest`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from iobench.goodput import intervals
from iobench.goodput.costs import Costs
from iobench.goodput.failures import integral
from iobench.goodput.job import TrainingJob

__all__ = ["best_interval_s", "ettr", "first_order_ettr", "lost_work_s"]

_GRID = 2.0 ** np.arange(-4, 10.5, 0.5)  # factors of the best interval at a constant rate
_FINER = 17  # points between two of the last grid
_GRIDS = 5  # the spacing of the last one is 1e-4 of the interval


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
    return interval_s / job.mtbf_s * float(_durable(np.array([interval_s]), costs, job)[0])


@functools.lru_cache(maxsize=4096)
def best_interval_s(costs: Costs, job: TrainingJob) -> float:
    """Return the interval that maximises `ettr`, where no save waits for a slot.

    For failures without memory it is `intervals.optimal`, the solution of an equation. There is no
    such equation for other shapes: a grid around that solution is refined at its best point.
    """
    least_s = intervals.shortest(costs)
    constant_s = max(intervals.optimal(costs.blocking_s, job.mtbf_s), least_s)
    if job.failure_shape == 1 or costs.blocking_s == 0:
        return constant_s
    points = np.maximum(constant_s * _GRID, least_s)
    for _ in range(_GRIDS):
        values = points * _durable(points, costs, job)
        at = int(np.argmax(values))
        best_s, best = float(points[at]), values[at]
        points = np.geomspace(points[max(at - 1, 0)], points[min(at + 1, len(points) - 1)], _FINER)
    return best_s if best > 0 else constant_s


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
    failures, recovery = job.failures, np.array([job.restart_s + costs.restore_s])
    runs = float(failures.survival(recovery)[0])
    if runs == 0:
        return 0.0
    # The job trains at x after a failure if x - R is in the first t of a period and none came.
    trained = integral(
        lambda at: failures.summed(at.ravel(), np.full(at.size, period)).reshape(at.shape),
        recovery,
        recovery + interval_s,
    )
    durable = _durable(np.array([interval_s]), costs, job)
    return float((trained - interval_s * durable)[0]) / runs


def _durable(
    interval_s: NDArray[np.float64], costs: Costs, job: TrainingJob
) -> NDArray[np.float64]:
    """Return the mean number of checkpoints that become durable between two failures."""
    period_s = interval_s + costs.blocking_s
    first_s = costs.persist_s + job.restart_s + costs.restore_s + period_s
    return job.failures.summed(first_s, period_s)


def _check(interval_s: float, costs: Costs) -> None:
    least = intervals.shortest(costs)
    if not interval_s >= least * (1 - 1e-9):
        raise ValueError(f"at intervals of {interval_s} s saves wait for slots: {least} s is least")
