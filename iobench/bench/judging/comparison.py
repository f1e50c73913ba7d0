"""Comparison: whether one contender is faster than another, by a ratio and its interval.

A difference is claimed only when the whole interval of the ratio is beyond the noise floor, on one
side, and comes from at least five repetitions. The floor is the difference that an A/A run finds
between a contender and itself (`iobench run --aa`), or `LEAST_FLOOR` without an A/A run.
docs/statistics.md has the reasons and the error rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from iobench.bench.judging.stats import (
    Ratio,
    independent_log_ratio,
    median,
    paired_log_ratio,
    rate,
    student_quantile,
)
from iobench.results.identity import figure_of
from iobench.results.records import Sample

__all__ = [
    "LEAST_FLOOR",
    "LEAST_SAMPLES",
    "Difference",
    "Fastest",
    "Finding",
    "compare_paired",
    "compare_runs",
    "fastest",
    "noise_floor",
    "rates_by_repetition",
    "twins",
]

LEAST_FLOOR = 0.02
"""Differences up to 2% are never claimed: a convention, for machines whose floor is unknown."""
LEAST_SAMPLES = 5
"""With fewer pairs, chance alone orders all of them alike in more than 1 of 16 cases."""
_FALSE_CLAIMS = 0.05  # of runs of equal contenders


class Finding(StrEnum):
    """The result of comparing a candidate with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference shown"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How the rates of a candidate compare with those of a baseline.

    `ratio` is above 1 where the candidate is faster. `floor` is a fraction: 0.03 means that ratios
    between 1 / 1.03 and 1.03 are noise.
    """

    ratio: Ratio
    floor: float

    @property
    def finding(self) -> Finding:
        """Better or worse when the interval clears the floor, otherwise no difference shown."""
        interval = self.ratio.interval
        if interval is None or self.ratio.samples < LEAST_SAMPLES:
            return Finding.NONE
        if interval.low > 1 + self.floor:
            return Finding.BETTER
        return Finding.WORSE if interval.high < 1 / (1 + self.floor) else Finding.NONE


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
    rule of a pair (`Difference`) and Student's paired t test of the logarithms, with Bonferroni's
    correction for all pairs of contenders. Raises ValueError without a contender.
    """
    middles = [median(_rates(samples)) for samples in contenders]
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
    first, second = rates_by_repetition(one), rates_by_repetition(other)
    logs = [math.log(first[n] / second[n]) for n in sorted(first.keys() & second.keys())]
    if len(logs) < 2:
        return False
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(len(logs) - 1, 1 - _FALSE_CLAIMS / pairs) * error
    return abs(statistics.fmean(logs)) > reach


def compare_paired(
    candidate: Iterable[Sample], baseline: Iterable[Sample], floor: float = LEAST_FLOOR
) -> Difference | None:
    """Compare the candidate with the baseline within one run, repetition by repetition.

    Each side is the samples of one contender at one setting and one operation, such as all saves of
    `odirect`. Samples of one repetition form a pair; samples without a partner are left out.
    Several samples of one contender in one repetition (A/A) count as one: their bytes over their
    time. Returns None when no repetition has both. `floor` is the result of `noise_floor`.
    """
    first, second = rates_by_repetition(candidate), rates_by_repetition(baseline)
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    ratio = paired_log_ratio([first[n] for n in both], [second[n] for n in both])
    return Difference(ratio=ratio, floor=max(floor, LEAST_FLOOR))


def compare_runs(
    new: Iterable[Sample], old: Iterable[Sample], floor: float = LEAST_FLOOR
) -> Difference:
    """Compare the samples of a new run with those of an old run, unpaired.

    Several samples of one repetition count as one, like in `compare_paired`. Raises ValueError when
    either run has no samples.
    """
    first, second = (list(rates_by_repetition(samples).values()) for samples in (new, old))
    ratio = independent_log_ratio(first, second)
    return Difference(ratio=ratio, floor=max(floor, LEAST_FLOOR))


def noise_floor(samples: Iterable[Sample]) -> float | None:
    """Return the largest fraction that an A/A run cannot distinguish from no difference.

    None without an A/A run. `samples` are those of one operation. Where one contender has two
    samples in a repetition, they form a pair. The floor is the further end of the interval of their
    ratio.
    """
    groups: dict[tuple[str, str, str | None], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(figure_of(sample), []).append(sample)
    floors = []
    for same in groups.values():
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
    pairs = (_rates(same) for same in _by_repetition(samples).values() if len(same) == 2)
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
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.repetition, []).append(sample)
    return groups


def _rates(samples: Iterable[Sample]) -> Sequence[float]:
    return [rate(sample.bytes, sample.elapsed_s) for sample in samples]
