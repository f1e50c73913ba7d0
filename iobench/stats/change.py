"""Change point: whether, and where, the level of a series changes once.

The statistic is the likelihood ratio of one step against none, for logarithms of rates: n times the
logarithm of the sum of squares around one mean over that around two means, at the best position
(Hinkley, Biometrika 57, 1970). Its distribution without a step is simulated, by permuting the
residuals. So it needs no assumption about their distribution: outliers and rates of two values are
common on storage. Neighbouring saves are alike where others use the storage too. Such noise is
simulated as an autoregressive process with the correlation of the residuals, or else it looks like
a step (Buehlmann, Bernoulli 3, 1997: the sieve bootstrap). docs/statistics.md has the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iobench.stats.estimates import median

LEAST_CHANGE = 0.10
"""Smaller changes of the median are never claimed: SNIA calls a drift of 10% steady."""
LEAST_LENGTH = 3
"""The fewest values before a change, and after it."""
_FALSE_CHANGES = 0.02  # of series without a change, wanted: at most 5% are claimed in simulations
_SIMULATED = 499
_MOST_CORRELATED = 0.95
_TINY = 1e-12  # of the sum of squares: a perfect step leaves none

_Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A change of the level after the first `position` values; `low` to `high` is its 95% interval.

    Positions are numbers of values before the change.
    """

    position: int
    low: int
    high: int


def find_change(rates: Sequence[float]) -> ChangePoint | None:
    """Return where the level of `rates`, in the order of time, changes; None if no change is shown.

    A change is shown if chance finds as good a step in at most 2% of simulated series without one,
    and if the medians before and after it differ by 10% or more. Equal rates lead to equal results:
    the simulation has a fixed seed. Raises ValueError for rates that are not above zero.
    """
    if any(not 0 < one < math.inf for one in rates):
        raise ValueError("a change of rates needs rates above zero")
    if len(rates) < 2 * LEAST_LENGTH:
        return None
    logs = np.log(np.asarray(rates, dtype=np.float64))
    (found,), (position,) = _best_steps(logs[None])
    before, after = median(rates[:position]), median(rates[position:])
    if max(before, after) < (1 + LEAST_CHANGE) * min(before, after):
        return None
    random = np.random.default_rng(0)
    step = np.where(np.arange(len(rates)) < position, *_means(logs, position))
    residuals = logs - step
    correlation = _correlation(residuals)
    # Without correlation the values themselves are permuted, which is exact for any distribution.
    noise = _noise(residuals if correlation else logs, correlation, random)
    by_chance, _ = _best_steps(noise)
    if (1 + np.count_nonzero(by_chance >= found)) / (1 + _SIMULATED) > _FALSE_CHANGES:
        return None
    _, positions = _best_steps(step + _noise(residuals, correlation, random))
    low, high = np.quantile(positions, [0.025, 0.975], method="inverted_cdf")
    return ChangePoint(
        position=int(position), low=min(int(low), int(position)), high=max(int(high), int(position))
    )


def _means(logs: _Array, position: int) -> tuple[float, float]:
    return float(np.mean(logs[:position])), float(np.mean(logs[position:]))


def _best_steps(series: _Array) -> tuple[_Array, NDArray[np.int64]]:
    """Return the statistic of the best step in each row, and its position."""
    values = series - np.mean(series, axis=-1, keepdims=True)
    n = values.shape[-1]
    before = np.arange(LEAST_LENGTH, n - LEAST_LENGTH + 1)
    sums = np.cumsum(values, axis=-1)[:, before - 1]  # after the step their sum is the negative
    whole = np.maximum(np.sum(values**2, axis=-1), np.finfo(float).tiny)
    explained = np.max(sums**2 * (1 / before + 1 / (n - before)), axis=-1)
    best = np.argmax(sums**2 * (1 / before + 1 / (n - before)), axis=-1)
    rest = np.maximum(1 - explained / whole, _TINY)
    return -n * np.log(rest), before[best]


def _correlation(residuals: _Array) -> float:
    """Return the correlation of neighbours, 0 to 0.95, corrected for the bias of a short series
    (Marriott and Pope, Biometrika 41, 1954)."""
    squares = float(np.sum(residuals**2))
    if squares == 0:
        return 0.0
    seen = float(np.sum(residuals[1:] * residuals[:-1])) / squares
    return min(max(seen + (1 + 4 * seen) / residuals.size, 0.0), _MOST_CORRELATED)


def _noise(values: _Array, correlation: float, random: np.random.Generator) -> _Array:
    """Return simulated series like `values`, each with a new order of the same innovations."""
    if not correlation:
        return random.permuted(np.tile(values, (_SIMULATED, 1)), axis=1)
    innovations = values[1:] - correlation * values[:-1]
    # Twice as long, of which the first half lets the process forget its start.
    rows = random.permuted(np.tile(innovations, (_SIMULATED, 3)), axis=1)
    for column in range(1, rows.shape[1]):
        rows[:, column] += correlation * rows[:, column - 1]
    return rows[:, -values.size :]
