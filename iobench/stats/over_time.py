"""Over time: the rate of saves that follow each other, where it changes, and whether it is steady.

A device with a cache or with burst credits is fast at first. A round is a minute of saves, as in
the throughput test of SNIA (Solid State Storage Performance Test Specification 2.0.1), or a tenth
of a run that is shorter than 10 minutes. Its rate is that of all saves that begin in it.

Whether, and where, the level of a series changes once: the statistic is the likelihood ratio of one
step against none, for logarithms of rates: n times the logarithm of the sum of squares around one
mean over that around two means, at the best position (Hinkley, Biometrika 57, 1970). Its
distribution without a step is simulated, by permuting the residuals. So it needs no assumption
about their distribution: outliers and rates of two values are common on storage. Neighbouring saves
are alike where others use the storage too. Such noise is simulated as an autoregressive process
with the correlation of the residuals, or else it looks like a step (Buehlmann, Bernoulli 3, 1997:
the sieve bootstrap). docs/statistics.md has the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from iobench.results.identity import groups
from iobench.results.records import Sample
from iobench.stats.estimates import (
    Interval,
    SteadyState,
    median,
    median_interval,
    rate,
    steady_state,
)

_ROUND_S = 60.0
_LEAST_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """The point at which a rate changed, with the rates before and after it and their intervals.

    `at_s` is the start of the first save after the change. The change itself is in the interval
    `at_s_ci95`: from the start of the last save that may be before it to the end of the
    first one that must be after it. Times are seconds since the first save of the run, and
    `written_bytes` are those of all saves that began before `at_s`.
    """

    at_s: float
    at_s_ci95: Interval
    written_bytes: int
    before_bytes_per_s: float
    before_ci95_bytes_per_s: Interval | None
    after_bytes_per_s: float
    after_ci95_bytes_per_s: Interval | None


@dataclass(frozen=True, kw_only=True)
class OverTime:
    """How the rate of one contender's saves went over the time of a run.

    `elapsed_s` is from the start of the run's first save to the end of this contender's last one.
    `saving` is the part of this time in which any contender saved. `range` and `slope` are those of
    the last five of `rounds` (see `SteadyState`); None for fewer, and `steady` is False then.
    `change` is None where no change is shown.
    """

    elapsed_s: float
    saving: float
    round_s: float
    rounds: int
    range: float | None
    slope: float | None
    steady: bool
    change: RateChange | None

    @property
    def state(self) -> SteadyState | None:
        """The state of the last five rounds; None for fewer."""
        if self.range is None or self.slope is None:
            return None
        return SteadyState(range=self.range, slope=self.slope)


def round_length(duration_s: float) -> float:
    """Return the seconds of a round in a run of `duration_s`."""
    return min(_ROUND_S, duration_s / _LEAST_ROUNDS)


def rates_by_round(saves: Sequence[Sample], round_s: float, began_s: float) -> list[float]:
    """Return the rate of each complete round with saves, in the order of time.

    `saves` are those of one contender. Rounds are counted from `began_s`, a time of `start_of`. A
    save that is longer than a round is a round.
    """
    rounds: dict[int, list[Sample]] = {}
    for one in saves:
        rounds.setdefault(int((start_of(one) - began_s) // round_s), []).append(one)
    over_s = max((start_of(one) + one.elapsed_s for one in saves), default=began_s)
    complete = (over_s - began_s) // round_s
    return [
        rate(sum(one.bytes for one in same), sum(one.elapsed_s for one in same))
        for number, same in sorted(rounds.items())
        if number < complete
    ]


def all_steady(samples: Iterable[Sample], round_s: float) -> bool:
    """Return whether the saves of each contender are at a steady state; False without any."""
    series = groups(one for one in samples if one.operation == "save")
    if not series:
        return False
    began_s = min(start_of(one) for same in series.values() for one in same)
    rounds = (rates_by_round(same, round_s, began_s) for same in series.values())
    states = map(steady_state, rounds)
    return all(state is not None and state.steady for state in states)


def over_time(saves: Sequence[Sample], of_run: Sequence[Sample], round_s: float) -> OverTime:
    """Return how the rate of `saves` went; `of_run` are all saves of the run and target."""
    saves = sorted(saves, key=start_of)
    began_s = min(map(start_of, of_run))
    over_s = start_of(saves[-1]) + saves[-1].elapsed_s
    elapsed_s = over_s - began_s
    during = (one.elapsed_s for one in of_run if start_of(one) < over_s)
    rounds = rates_by_round(saves, round_s, began_s)
    state = steady_state(rounds)
    return OverTime(
        elapsed_s=elapsed_s,
        saving=min(1.0, sum(during) / elapsed_s),
        round_s=round_s,
        rounds=len(rounds),
        range=state.range if state else None,
        slope=state.slope if state else None,
        steady=state is not None and state.steady,
        change=_change(saves, of_run, began_s),
    )


def _change(saves: Sequence[Sample], of_run: Sequence[Sample], began_s: float) -> RateChange | None:
    rates = [rate(one.bytes, one.elapsed_s) for one in saves]
    found = find_change(rates)
    if found is None:
        return None
    before, after = rates[: found.position], rates[found.position :]
    last, first = saves[found.low - 1], saves[found.high]
    at_s = start_of(saves[found.position])
    return RateChange(
        at_s=at_s - began_s,
        at_s_ci95=Interval(start_of(last) - began_s, start_of(first) + first.elapsed_s - began_s),
        written_bytes=sum(one.bytes for one in of_run if start_of(one) < at_s),
        before_bytes_per_s=median(before),
        before_ci95_bytes_per_s=median_interval(before),
        after_bytes_per_s=median(after),
        after_ci95_bytes_per_s=median_interval(after),
    )


def start_of(sample: Sample) -> float:
    """Return when the clock of `sample` started, in seconds since 1970."""
    return datetime.fromisoformat(sample.started_at).timestamp()


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
    step = np.where(
        np.arange(len(rates)) < position, np.mean(logs[:position]), np.mean(logs[position:])
    )
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
