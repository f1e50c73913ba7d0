"""Comparison of several runs with several others: the spread between runs is the noise floor.

Runs of unchanged code differ by more than their samples do: the storage, its free space and other
tenants change from run to run. So a run counts as one level, and levels are compared.
docs/statistics.md has the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iobench.bench.judging.comparison import LEAST_FLOOR, Finding, rates_by_repetition
from iobench.bench.judging.stats import Interval, Ratio, log_ratio, student_quantile
from iobench.results.records import Sample

__all__ = ["RunsDifference", "compare_levels", "control_floor", "huber_mean", "level"]

_HUBER = 2.0  # 99% as efficient as the mean for normal noise
_CONFIDENCE = 0.952  # at 95% false alarms would be 5% exactly, and no simulation could bound them
_TINY = 1e-300  # in place of a distance of zero
_SWEEPS = 20


@dataclass(frozen=True, kw_only=True)
class RunsDifference:
    """How the levels of new runs compare with those of old ones.

    `ratio` is above 1 where the new runs are faster; its `samples` are the runs of both sides.
    `floor` is the fraction that the spread between runs explains, at least LEAST_FLOOR.
    """

    ratio: Ratio
    floor: float

    @property
    def finding(self) -> Finding:
        """Better or worse when the ratio is beyond the floor, otherwise no difference shown."""
        if self.ratio.ratio > 1 + self.floor:
            return Finding.BETTER
        return Finding.WORSE if self.ratio.ratio < 1 / (1 + self.floor) else Finding.NONE


def level(samples: Iterable[Sample]) -> float:
    """Return the rate of one contender in one run: Huber's mean of its repetitions' logarithms.

    It is as precise as a mean for normal noise, and a stalled repetition hardly moves it
    (Huber, Annals of Mathematical Statistics 35, 1964). `samples` are of one operation.
    """
    logs = np.log(list(rates_by_repetition(samples).values()))
    return math.exp(float(huber_mean(logs)))


def huber_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Huber's mean along the last axis. Its scale is the MAD."""
    middle = np.median(values, axis=-1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(values - middle), axis=-1, keepdims=True)
    reach = np.maximum(_HUBER * spread, _TINY)
    for _ in range(_SWEEPS):
        weights = np.minimum(1, reach / np.maximum(np.abs(values - middle), _TINY))
        middle = np.average(values, axis=-1, weights=weights, keepdims=True)
    return np.asarray(middle[..., 0])


def compare_levels(new: Sequence[float], old: Sequence[float]) -> RunsDifference:
    """Compare the levels of new runs with those of old ones, in bytes per second.

    The interval is that of Student's t test on the logarithms of levels, with the spread of both
    sides pooled. A change of code hardly changes how much runs differ. With a few runs a side, the
    spread of each side alone is too uncertain to show much. Levels contain the noise of samples, so
    nothing is added for it. Raises ValueError unless one side has two runs.
    """
    if max(len(new), len(old)) < 2 or min(len(new), len(old)) < 1:
        raise ValueError("one side needs two runs or more, and the other one")
    logs = [np.log(side) for side in (new, old)]
    free = len(new) + len(old) - 2
    variance = sum(float(np.sum((one - np.mean(one)) ** 2)) for one in logs) / free
    reach = student_quantile(free, _CONFIDENCE) * math.sqrt(
        variance * (1 / len(new) + 1 / len(old))
    )
    middle = float(np.mean(logs[0]) - np.mean(logs[1]))
    return RunsDifference(
        ratio=log_ratio(middle, Interval(middle - reach, middle + reach), len(new) + len(old)),
        floor=max(math.expm1(reach), LEAST_FLOOR),
    )


def control_floor(floor: float, ratio: float, controls: Iterable[float]) -> float:
    """Return the floor of a ratio, given the ratios of contenders whose code did not change.

    The storage moved those controls. So a contender must exceed the control that moved furthest in
    the same direction, by its own floor.
    """
    shifts = [max(one, 1 / one) for one in controls if (one < 1) == (ratio < 1)]
    return (1 + floor) * max(shifts, default=1.0) - 1
