"""Statistics of a benchmark.

A rate is total bytes over total time, never a mean of rates. Several samples are reported as their
median with its order-statistic interval. Every sample counts: outliers are flagged only.
Methods and sources: docs/statistics.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_INTERVAL = "1 sample: no interval"

_GRID = 20_001

CONFIDENCE = 0.95
"""The confidence of an interval with enough samples."""
ENOUGH_SAMPLES = 6
"""The fewest samples whose interval reaches CONFIDENCE."""

_HUBER = 2.0  # 99% as efficient as the mean for normal noise
_TINY = 1e-300  # in place of a distance of zero
_SWEEPS, _SETTLED = 20, 1e-9
_FEWEST_FOR_OUTLIERS = 5
_ROUNDS = 5  # rounds of a measurement window; like both limits, from SNIA: see SteadyState
_RANGE_LIMIT, _SLOPE_LIMIT = 0.20, 0.10


class Interval(NamedTuple):
    """`low <= high`, in the unit of the values that it is computed from.

    All documents write it as a list of both: `[low, high]`.
    """

    low: float
    high: float

    def __contains__(self, value: float) -> bool:  # type: ignore[override]  # not: is it an end
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times larger the first of two series is; `interval` is None for 1 sample.

    `samples` is the number of pairs, for two runs the repetitions of the shorter one, and for
    several runs a side their number.
    """

    ratio: float
    interval: Interval | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """How much the last five rounds vary, as fractions of their mean.

    `range` is largest less smallest. `slope` is the drift of a fitted line from the first of them
    to the last. `steady` when the range is at most 20% and the drift at most 10%: SNIA, Solid
    State Storage Performance Test Specification 2.0.1, definition of steady state.
    """

    range: float
    slope: float

    @property
    def steady(self) -> bool:
        return self.range <= _RANGE_LIMIT and self.slope <= _SLOPE_LIMIT


def rate(total_bytes: float, total_s: float) -> float:
    """Return bytes per second: total bytes over total time. ValueError unless `total_s` > 0."""
    if total_s <= 0:
        raise ValueError(f"a rate needs a time above zero, not {total_s} s")
    return total_bytes / total_s


def median(values: Sequence[float]) -> float:
    """Return the median: for an even number the mean of the middle two. ValueError for none."""
    return float(statistics.median(_array(values).tolist()))


def highest(values: Iterable[int | None]) -> int | None:
    """Return the largest of the known values; None without any."""
    return max((value for value in values if value is not None), default=None)


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the order-statistic interval of the median; None for 1 value: show NO_INTERVAL.

    It reaches from the k-th smallest to the k-th largest value. k is the largest rank with
    2 P(Binomial(n, 1/2) < k) <= 1 - CONFIDENCE, so the interval holds the true median at least that
    often, for any distribution (the sign test: Conover, Practical Nonparametric Statistics,
    3rd ed., 1999, section 3.2). With few values the range is returned, which holds it less often:
    see `confidence_of`.
    """
    ordered = np.sort(_array(values))
    n = int(ordered.size)
    k = _rank(n)
    return None if n == 1 else Interval(float(ordered[k - 1]), float(ordered[n - k]))


def confidence_of(samples: int) -> float:
    """Return the confidence that an interval of so many samples reaches, at most CONFIDENCE.

    The range of n values holds the median with 1 - 2^(1-n): 50% for 2, 75% for 3, 94% for 5.
    """
    return max(0.0, min(CONFIDENCE, 1 - 2.0 ** (1 - samples)))


def interval_heading(samples: Iterable[int]) -> str:
    """Return the heading of a column of intervals: `95%`, a line break, `interval`.

    The row with the fewest samples decides, so every interval reaches the confidence of the
    heading. Rows with 1 sample have no interval, and do not count.
    """
    fewest = min((one for one in samples if one > 1), default=ENOUGH_SAMPLES)
    return f"{100 * confidence_of(fewest):.0f}%\ninterval"


@lru_cache(maxsize=1024)
def _rank(n: int) -> int:
    """Return k of `median_interval`. Sums of probabilities: 2^n overflows a float from 1,024 on."""
    heads = np.arange(1, n // 2 + 1)
    log_counts = np.concatenate([[0.0], np.cumsum(np.log((n - heads + 1) / heads))])
    at_most = np.cumsum(np.exp(log_counts - n * math.log(2)))
    return max(1, int(np.count_nonzero(2 * at_most <= 1 - CONFIDENCE)))


def outliers(values: Sequence[float], threshold: float = 3.5) -> list[int]:
    """Return the positions of the values whose modified z-score exceeds `threshold`.

    0.6745 |x - median| / MAD with threshold 3.5, and |x - median| / (1.2533 mean deviation) where
    the MAD is zero: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993), section 3.
    With fewer than 5 values an outlier cannot be recognised, and no value is flagged.
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


def paired_log_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return how many times larger `a` is than `b`, pair by pair: exp(median(log(a_i / b_i))).

    Pairs are samples of one repetition, so a disturbance of both cancels. With logarithms "twice"
    and "half" have the same weight: swapping `a` and `b` gives the inverse. The interval is that of
    `median_interval`. Raises ValueError for series of different length, empty ones, and values that
    are not above zero.
    """
    logs = [math.log(x) - math.log(y) for x, y in zip(a, b, strict=True)]
    return log_ratio(median(logs), median_interval(logs), len(logs))


def paired_logs(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return the logarithm of a / b at each key that both have, in the order of the keys."""
    return [math.log(a[key] / b[key]) for key in sorted(a.keys() & b.keys())]


def steady_state(rounds: Sequence[float]) -> SteadyState | None:
    """Return how steady the last five of `rounds` are, in the order of time; None for fewer."""
    if len(rounds) < _ROUNDS:
        return None
    window = _array(rounds)[-_ROUNDS:]
    mean = float(np.mean(window))
    if mean <= 0:
        raise ValueError("a steady state needs a mean above zero")
    slope = float(np.polyfit(np.arange(_ROUNDS), window, 1)[0])
    return SteadyState(range=float(np.ptp(window)) / mean, slope=abs(slope) * (_ROUNDS - 1) / mean)


def log_ratio(log: float, interval: Interval | None, samples: int) -> Ratio:
    """Return the ratio whose logarithm, with its interval, is given."""
    return Ratio(
        ratio=math.exp(log),
        interval=interval and Interval(math.exp(interval.low), math.exp(interval.high)),
        samples=samples,
    )


def huber_mean(values: Sequence[float]) -> float:
    """Return Huber's mean; its scale is the MAD.

    It is nearly as precise as the mean for normal noise, and one outlier hardly moves it (Huber,
    Annals of Mathematical Statistics 35, 1964).
    """
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(one - middle) for one in values)
    reach = max(_HUBER * spread, _TINY)
    for _ in range(_SWEEPS):
        weights = [min(1.0, reach / max(abs(one - middle), _TINY)) for one in values]
        before, middle = middle, sum(map(mul, weights, values)) / sum(weights)
        if abs(middle - before) <= _SETTLED * reach:
            break
    return middle


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values")
    if not np.isfinite(array).all():
        raise ValueError("every value must be finite")
    return array


@lru_cache(maxsize=1024)
def student_quantile(free: int, confidence: float) -> float:
    """Return t with P(|T| < t) = `confidence` for `free` degrees of freedom, 1 or more.

    With t = sqrt(free) tan(x) the density of |T| is proportional to cos(x)^(free - 1).
    """
    angles = np.linspace(0, math.pi / 2, _GRID)
    density = np.cos(angles) ** (free - 1)
    parts = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(free) * math.tan(float(np.interp(confidence, parts / parts[-1], angles)))
