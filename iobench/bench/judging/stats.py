"""The statistics of a benchmark, few and exact.

A rate is total bytes over total time, never a mean of rates. What is reported of several samples is
their median with a percentile-bootstrap interval. Every sample counts: outliers are flagged only.
Methods and sources: docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_INTERVAL",
    "Interval",
    "Ratio",
    "SteadyState",
    "bootstrap_median_interval",
    "independent_log_ratio",
    "median",
    "outliers",
    "paired_log_ratio",
    "rate",
    "sign_interval",
    "steady_state",
]

NO_INTERVAL = "1 sample: no interval"

_SEED = 20260131
_RESAMPLES = 10_000
_FEWEST_FOR_OUTLIERS = 5
_ROUNDS = 5  # of a measurement window; also the two limits: SNIA, see SteadyState
_RANGE_LIMIT, _SLOPE_LIMIT = 0.20, 0.10


@dataclass(frozen=True)
class Interval:
    """`low <= high`, in the unit of the values it was made from."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times larger the first of two series is; `interval` is None for 1 sample.

    `samples` are the pairs, or of unpaired series those of the shorter one.
    """

    ratio: float
    interval: Interval | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """How much the last five rounds vary: largest less smallest, and the drift of a fitted line
    from the first of them to the last, both as parts of their mean.

    `steady` when the range is at most 20 % and the drift at most 10 %: SNIA, Solid State Storage
    Performance Test Specification 2.0.1, definition of steady state.
    """

    range: float
    slope: float

    @property
    def steady(self) -> bool:
        return self.range <= _RANGE_LIMIT and self.slope <= _SLOPE_LIMIT


def rate(total_bytes: float, total_s: float) -> float:
    """Bytes per second: total bytes over total seconds. Raises ValueError unless `total_s` > 0."""
    if total_s <= 0:
        raise ValueError(f"a rate needs a time above zero, not {total_s} s")
    return total_bytes / total_s


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the middle two of an even number. ValueError for none."""
    return float(np.median(_array(values)))


def bootstrap_median_interval(
    values: Sequence[float],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = _SEED,
) -> Interval | None:
    """The percentile-bootstrap interval of the median; None for 1 value (say NO_INTERVAL).

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3. Equal arguments
    give equal intervals. Of n < 6 values it is nearly their range, and no interval made of order
    statistics can do better: the range itself holds the true median in 1 - 2^(1-n) of all cases
    (50 % for n = 2, 75 % for 3, 94 % for 5).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, and is {confidence}")
    given = _array(values)
    if given.size == 1:
        return None
    picks = np.random.default_rng(seed).integers(0, given.size, size=(resamples, given.size))
    medians = np.median(given[picks], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def outliers(values: Sequence[float], threshold: float = 3.5) -> list[int]:
    """Positions of the values whose modified z-score exceeds `threshold`.

    0.6745 |x - median| / MAD with threshold 3.5, and |x - median| / (1.2533 mean deviation) where
    the MAD is zero: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993), section 3.
    Fewer than 5 values tell no outlier from the rest: none is flagged.
    """
    given = _array(values)
    if given.size < _FEWEST_FOR_OUTLIERS:
        return []
    deviations = np.abs(given - np.median(given))
    spread = float(np.median(deviations)) / 0.6745
    if spread == 0:
        spread = float(np.mean(deviations)) * math.sqrt(math.pi / 2)
    if spread == 0:
        return []
    return [int(i) for i in np.flatnonzero(deviations / spread > threshold)]


def sign_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """The interval of the median that the sign test gives, exact for any distribution.

    From the k-th smallest to the k-th largest value, k the largest with
    2 P(Binomial(n, 1/2) < k) <= 1 - confidence; the range where even that holds the median less
    often (n < 6 for 95 %). None for 1 value. Conover, Practical Nonparametric Statistics (3rd ed.,
    1999), section 3.2.
    """
    given = np.sort(_array(values))
    n = int(given.size)
    if n == 1:
        return None
    k, below = 1, 1  # of the 2^n outcomes of n throws, `below` have fewer than k heads
    while 2 * (below + math.comb(n, k)) <= (1 - confidence) * 2**n:
        below += math.comb(n, k)
        k += 1
    return Interval(float(given[k - 1]), float(given[n - k]))


def paired_log_ratio(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = _SEED,
) -> Ratio:
    """How many times larger `a` is than `b`, pair by pair: exp(median(log(a_i / b_i))).

    Pairs are samples of one repetition, so what disturbs both cancels. Logarithms make "twice" and
    "half" weigh the same: swapping `a` and `b` gives the inverse. The interval is the bootstrap's,
    and never narrower than `sign_interval`: of few pairs the bootstrap's alone holds the true
    median less often than it says (87 % for 7). Raises ValueError for series of unlike length,
    empty ones, and values that are not above zero.
    """
    first, second = _logs(a), _logs(b)
    if first.size != second.size:
        raise ValueError(f"pairs need series of one length, not {first.size} and {second.size}")
    logs = (first - second).tolist()
    interval = bootstrap_median_interval(logs, confidence, resamples, seed)
    exact = sign_interval(logs, confidence)
    if interval and exact:
        interval = Interval(min(interval.low, exact.low), max(interval.high, exact.high))
    return _ratio(float(np.median(logs)), interval, len(logs))


def independent_log_ratio(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = _SEED,
) -> Ratio:
    """How many times larger the median of `a` is than that of `b`, for series of different runs.

    exp(median(log a) - median(log b)), each series resampled by itself (Efron and Tibshirani,
    sections 8.3 and 13.3). No interval where either has 1 value. Raises ValueError for empty series
    and values that are not above zero.
    """
    first, second = _logs(a), _logs(b)
    interval = None
    if first.size > 1 and second.size > 1:
        random = np.random.default_rng(seed)
        medians = [
            np.median(logs[random.integers(0, logs.size, size=(resamples, logs.size))], axis=1)
            for logs in (first, second)
        ]
        ends = [(1 - confidence) / 2, (1 + confidence) / 2]
        low, high = np.quantile(medians[0] - medians[1], ends)
        interval = Interval(float(low), float(high))
    middle = float(np.median(first) - np.median(second))
    return _ratio(middle, interval, int(min(first.size, second.size)))


def steady_state(rounds: Sequence[float]) -> SteadyState | None:
    """How steady the last five of `rounds` are, in the order of time; None for fewer."""
    if len(rounds) < _ROUNDS:
        return None
    window = _array(rounds)[-_ROUNDS:]
    mean = float(np.mean(window))
    if mean <= 0:
        raise ValueError("a steady state needs a mean above zero")
    slope = float(np.polyfit(np.arange(_ROUNDS), window, 1)[0])
    return SteadyState(range=float(np.ptp(window)) / mean, slope=abs(slope) * (_ROUNDS - 1) / mean)


def _ratio(log: float, interval: Interval | None, samples: int) -> Ratio:
    return Ratio(
        ratio=math.exp(log),
        interval=interval and Interval(math.exp(interval.low), math.exp(interval.high)),
        samples=samples,
    )


def _logs(values: Sequence[float]) -> NDArray[np.float64]:
    array = _array(values)
    if (array <= 0).any():
        raise ValueError("a ratio needs values above zero")
    logs: NDArray[np.float64] = np.log(array)
    return logs


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values")
    if not np.isfinite(array).all():
        raise ValueError("every value must be finite")
    return array
