"""Comparison: whether one contender is faster than another, by a ratio and its interval.

A difference is claimed only when the whole interval of the ratio is beyond the noise floor, on one
side, and comes from enough samples. The floor is the difference that an A/A run finds between a
contender and itself (`iobench run --aa`), or `LEAST_FLOOR` without an A/A run. This is the rule
within a run, between runs and in a tuning. docs/statistics.md has the reasons and the error rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from iobench.results.identity import groups
from iobench.results.records import Sample
from iobench.stats.estimates import (
    CONFIDENCE,
    Interval,
    Ratio,
    huber_mean,
    log_ratio,
    median,
    paired_log_ratio,
    paired_logs,
    rate,
    student_quantile,
)
from iobench.units import count_of

LEAST_FLOOR = 0.02
"""Differences up to 2% are never claimed: a convention, for machines whose floor is unknown."""
LEAST_SAMPLES = 5
"""With fewer pairs, chance alone orders all of them alike in more than 1 of 16 cases."""
_FALSE_CLAIMS = 1 - CONFIDENCE  # of runs of equal contenders
_LEAST_RUNS = 3  # of both sides: from three on, a side has a spread


class Finding(StrEnum):
    """The result of comparing a candidate with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference shown"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the rates, or other values, of a candidate compare with those of a baseline.

    `ratio` is above 1 where the candidate is faster. `floor` is a fraction: 0.03 means that ratios
    between 1 / 1.03 and 1.03 are noise. `least` are the fewest samples that show a difference.
    `than` is the ratio that another one has published; 1 where both are measured here.
    """

    ratio: Ratio
    floor: float
    least: int = LEAST_SAMPLES
    than: float = 1.0

    @property
    def finding(self) -> Finding:
        """Better or worse when the interval clears the floor, otherwise no difference shown."""
        interval = self.ratio.interval
        if interval is None or self.ratio.samples < self.least:
            return Finding.NONE
        if interval.low > self.than * (1 + self.floor):
            return Finding.BETTER
        clear = interval.high < self.than / (1 + self.floor)
        return Finding.WORSE if clear else Finding.NONE


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """Positions of the contender with the highest median, and of its equals.

    `equals` are the contenders that it is not shown to be faster than. Without equals it is the
    winner. Of contenders that are all equally fast, at most 5% of runs show any difference.
    """

    first: int
    equals: tuple[int, ...]


def fastest(contenders: Sequence[Sequence[Sample]], floor: float = LEAST_FLOOR) -> Fastest:
    """Return the fastest of several contenders, from their samples of one operation and run.

    The fastest is chosen by the same samples that it is compared by. So a difference must pass the
    rule of a pair (`Comparison`) and Student's paired t test of the logarithms, with Bonferroni's
    correction for all pairs of contenders. Raises ValueError without a contender.
    """
    middles = [median(rates(samples)) for samples in contenders]
    first = max(range(len(middles)), key=middles.__getitem__)
    pairs = max(1, math.comb(len(contenders), 2))
    equals = []
    for position, samples in enumerate(contenders):
        difference = compare_paired(contenders[first], samples, floor)
        shown = difference is not None and difference.finding is Finding.BETTER
        shown = shown and _is_beyond_chance(contenders[first], samples, pairs)
        if position != first and not shown:
            equals.append(position)
    return Fastest(first=first, equals=tuple(equals))


def _is_beyond_chance(one: Iterable[Sample], other: Iterable[Sample], pairs: int) -> bool:
    """Return whether the paired t test shows a difference at 5% over `pairs` comparisons."""
    logs = paired_logs(rates_by_repetition(one), rates_by_repetition(other))
    if len(logs) < 2:
        return False
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(len(logs) - 1, 1 - _FALSE_CLAIMS / pairs) * error
    return abs(statistics.fmean(logs)) > reach


def few_pairs(count: int) -> str:
    """Return why so few pairs leave a finding undecided: `2 pairs, 5 needed`."""
    return f"{count_of(count, 'pair')}, {LEAST_SAMPLES} needed"


def compare_paired(
    candidate: Iterable[Sample], baseline: Iterable[Sample], floor: float = LEAST_FLOOR
) -> Comparison | None:
    """Compare the candidate with the baseline within one run, repetition by repetition.

    Each side is the samples of one contender at one setting and one operation, such as all saves of
    `odirect`. Samples of one repetition form a pair; samples without a partner are left out.
    Several samples of one contender in one repetition (A/A) count as one: their bytes over their
    time. Returns None when no repetition has both. `floor` is the result of `noise_floor`.
    """
    first, second = rates_by_repetition(candidate), rates_by_repetition(baseline)
    return compare_pairs(first, second, max(floor, LEAST_FLOOR))


def compare_pairs(
    candidate: Mapping[int, float],
    baseline: Mapping[int, float],
    floor: float = LEAST_FLOOR,
    least: int = LEAST_SAMPLES,
) -> Comparison | None:
    """Compare values above zero, more is better, at the keys that both have; None without any."""
    both = sorted(candidate.keys() & baseline.keys())
    if not both:
        return None
    ratio = paired_log_ratio([candidate[n] for n in both], [baseline[n] for n in both])
    return Comparison(ratio=ratio, floor=floor, least=least)


def compare_runs(
    new: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]],
    floor: float = LEAST_FLOOR,
    *,
    rows: int = 1,
) -> Comparison:
    """Compare new runs of one contender and operation with old ones, unpaired.

    Each element of `new` and `old` has the rates of one run, see `rates_by_repetition`. Two runs of
    unchanged code differ by more than their samples do, so a run counts as one level, Huber's mean
    of its logarithms, where a side has several. With one run a side its repetitions are compared,
    and the spread between runs is unknown.

    The interval is that of Student's t test on the logarithms, with the spread of both sides
    pooled: a change of code hardly changes how much runs differ. `rows` is the number of
    comparisons of one command. All their intervals together hold in 95% of all commands
    (Bonferroni). Raises ValueError for a side without samples.
    """
    sides = [[np.log(run) for run in side] for side in (new, old)]
    runs = [run for side in sides for run in side]
    if not all(sides) or not all(run.size for run in runs):
        raise ValueError("each side needs a run, and each run needs samples")
    confidence = 1 - _FALSE_CLAIMS / rows
    if len(runs) == 2:
        middle, interval = _student(sides[0][0], sides[1][0], 0.0, confidence)
        samples, least = min(run.size for run in runs), LEAST_SAMPLES
    else:
        errors = [float(np.var(run, ddof=1)) / run.size for run in runs if run.size > 1]
        levels = [np.array([huber_mean(run.tolist()) for run in side]) for side in sides]
        least_variance = statistics.fmean(errors or [0.0])
        middle, interval = _student(levels[0], levels[1], least_variance, confidence)
        samples, least = len(runs), _LEAST_RUNS
    return Comparison(
        ratio=log_ratio(middle, interval, samples), floor=max(floor, LEAST_FLOOR), least=least
    )


def _student(
    new: NDArray[np.float64], old: NDArray[np.float64], least: float, confidence: float
) -> tuple[float, Interval | None]:
    """Return the difference of two means, and its interval; None for one value on each side.

    The variance of a value counts as `least` or more. The levels of two runs a side are equal by
    chance where samples have few values, such as fast and slow: their spread would be zero.
    """
    middle, free = float(np.mean(new) - np.mean(old)), new.size + old.size - 2
    if free < 1:
        return middle, None
    spread = sum(float(np.sum((side - np.mean(side)) ** 2)) for side in (new, old)) / free
    error = math.sqrt(max(spread, least) * (1 / new.size + 1 / old.size))
    reach = student_quantile(free, confidence) * error
    return middle, Interval(middle - reach, middle + reach)


def control_floor(floor: float, ratio: float, controls: Iterable[float]) -> float:
    """Return the floor of a ratio, given the ratios of contenders whose code did not change.

    The storage moved those controls. So a contender must exceed the control that moved furthest in
    the same direction, by its own floor.
    """
    shifts = [max(one, 1 / one) for one in controls if (one < 1) == (ratio < 1)]
    return (1 + floor) * max(shifts, default=1.0) - 1


def noise_floor(samples: Iterable[Sample]) -> float | None:
    """Return the largest fraction that an A/A run cannot distinguish from no difference.

    None without an A/A run. `samples` are those of one operation. Where one contender has two
    samples in a repetition, they form a pair. The floor is the further end of the interval of their
    ratio.
    """
    floors = []
    for same in groups(samples).values():
        pairs = twins(same)
        if len(pairs) >= LEAST_SAMPLES:
            interval = paired_log_ratio([a for a, _ in pairs], [b for _, b in pairs]).interval
            assert interval is not None
            floors.append(max(interval.high, 1 / interval.low) - 1)
    return max(floors, default=None)


def twins(samples: Iterable[Sample]) -> list[tuple[float, float]]:
    """Return the rates of both samples of each repetition that has two, as in an A/A run.

    `samples` are those of one contender at one setting and one operation.
    """
    pairs = (rates(same) for same in _by_repetition(samples).values() if len(same) == 2)
    return [(first, second) for first, second in pairs]


def rates_by_repetition(samples: Iterable[Sample]) -> dict[int, float]:
    """Return the rate of each repetition, in the order of time: all its bytes over all its time.

    `samples` are those of one contender at one setting and one operation. Two samples of one
    repetition count as one.
    """
    return {
        number: rate(sum(s.bytes for s in same), sum(s.elapsed_s for s in same))
        for number, same in _by_repetition(samples).items()
    }


def _by_repetition(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.repetition, []).append(sample)
    return found


def rates(samples: Iterable[Sample]) -> list[float]:
    """Return the rate of each sample, in bytes per second."""
    return [rate(sample.bytes, sample.elapsed_s) for sample in samples]
