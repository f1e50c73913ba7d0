"""Intervals: the training time between two checkpoints, by each formula.

All times are seconds. An interval is always the training time between the end of one blocking part
and the start of the next. It does not include the save.
"""

from __future__ import annotations

import math

from iobench.goodput.costs import Costs

__all__ = [
    "availability_optimal",
    "by_budget",
    "daly",
    "optimal",
    "shortest",
    "young",
]

_MOST_STEPS = 200  # of Newton's method; fewer than 10 are usual


def young(save_s: float, mtbf_s: float) -> float:
    """Return `sqrt(2 d M)` for a save of d and a mean time between failures of M.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    Holds for d and restart far below M.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return `sqrt(2 d M) [1 + sqrt(d / 2M) / 3 + (d / 2M) / 9] - d` for d < 2 M, else M.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS
    22(3), 2006. Its figures 3 to 5: d = 5 min gives 117 min for M = 24 h, 57 min for
    6 h and 9.1 min for 15 min.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def availability_optimal(save_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Return `sqrt(2 (M + R) d + d^2)` for a recovery (restart and restore) of R.

    N. R. Saxena and others, Optimal checkpoint interval with availability as an objective function,
    arXiv 2410.18124, whose interval counts the save too: `d + sqrt(2 (M + R) d + d^2)`. That
    maximises `(1 - d / T) M / (M + R + T / 2)` over the period T.
    """
    return math.sqrt(2 * (mtbf_s + recovery_s) * save_s + save_s**2)


def optimal(save_s: float, mtbf_s: float) -> float:
    """Return the interval that maximises `goodput.ettr`, to the last digits.

    It solves the equation that Daly's formula approximates: `(1 - t / M) e^((t + d) / M) = 1`. With
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


def by_budget(costs: Costs, budget: float, step_s: float | None = None) -> float:
    """Return the shortest interval that keeps within `budget` and waits for no earlier save.

    The rule of CheckFreq (Mohan and others, FAST 2021, section 4.3, and its cf_iterator.py): every
    `max(ceil(persist / step), 1)` steps, then two steps more while the overhead exceeds the budget
    (0.035 there). The overhead is the blocking time over the training time. Without `step_s` the
    interval is not rounded to steps. The rule ignores failures.
    """
    if not budget > 0:
        raise ValueError(f"a budget must be above zero, and is {budget}")
    enough_s = costs.blocking_s / budget
    if step_s is None:
        return max(costs.persist_s, enough_s)
    steps = max(math.ceil(costs.persist_s / step_s), 1)
    more = math.ceil(max(enough_s / step_s - steps, 0) / 2)
    return (steps + 2 * more) * step_s


def shortest(costs: Costs) -> float:
    """Return `(blocking + persist) / slots - blocking`: below it, saves wait for a slot.

    PCcheck (Strati and others, ASPLOS 2025): every `f >= T_w / (N q t)` steps for N saves in flight
    that take T_w, steps of t and a slow-down of q; here q = 1, and a slot is held during the
    blocking time too. With one slot it is CheckFreq's rule: the persist time.
    """
    return max((costs.blocking_s + costs.persist_s) / costs.slots - costs.blocking_s, 0.0)
