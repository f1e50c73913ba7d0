"""The statistics of a benchmark, few and exact.

A rate is total bytes over total time, never a mean of rates. What is reported of several samples is
their median with a percentile-bootstrap interval. Every sample counts: outliers are flagged only.
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
    "bootstrap_median_interval",
    "median",
    "outliers",
    "paired_log_ratio",
    "rate",
]

NO_INTERVAL = "1 sample: no interval"

_SEED = 20260131
_RESAMPLES = 10_000
_FEWEST_FOR_OUTLIERS = 5


@dataclass(frozen=True)
class Interval:
    """`low <= high`, in the unit of the values it was made from."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times larger the first of two paired series is; `interval` is None for 1 pair."""

    ratio: float
    interval: Interval | None
    pairs: int


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


def paired_log_ratio(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = _SEED,
) -> Ratio:
    """How many times larger `a` is than `b`, pair by pair: exp(median(log(a_i / b_i))).

    Pairs are samples of one repetition, so what disturbs both cancels. Logarithms make "twice" and
    "half" weigh the same: swapping `a` and `b` gives the inverse. Raises ValueError for series of
    unlike length, empty ones, and values that are not above zero.
    """
    first, second = _array(a), _array(b)
    if first.size != second.size:
        raise ValueError(f"pairs need series of one length, not {first.size} and {second.size}")
    if (first <= 0).any() or (second <= 0).any():
        raise ValueError("a ratio needs values above zero")
    logs = np.log(first) - np.log(second)
    interval = bootstrap_median_interval(logs.tolist(), confidence, resamples, seed)
    return Ratio(
        ratio=math.exp(np.median(logs)),
        interval=interval and Interval(math.exp(interval.low), math.exp(interval.high)),
        pairs=int(first.size),
    )


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values")
    if not np.isfinite(array).all():
        raise ValueError("every value must be finite")
    return array
