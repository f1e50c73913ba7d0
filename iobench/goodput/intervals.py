"""Intervals: the training time between two checkpoints, the best one and the shortest.

All times are seconds. An interval is always the training time between the end of one blocking part
and the start of the next. It does not include the save.
"""

from __future__ import annotations

import math

from iobench.goodput.costs import Costs

__all__ = ["optimal", "shortest"]

_MOST_STEPS = 200  # of Newton's method; fewer than 10 are usual


def optimal(save_s: float, mtbf_s: float) -> float:
    """Return the interval that maximises `goodput.ettr`, to the last digits.

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


def shortest(costs: Costs) -> float:
    """Return `(blocking + persist) / slots - blocking`: below it, saves wait for a slot.

    PCcheck (Strati and others, ASPLOS 2025): every `f >= T_w / (N q t)` steps for N saves in flight
    that take T_w, steps of t and a slow-down of q; here q = 1, and a slot is held during the
    blocking time too. With one slot it is the rule of CheckFreq (FAST 2021): the persist time.
    """
    return max((costs.blocking_s + costs.persist_s) / costs.slots - costs.blocking_s, 0.0)
