"""Repeat: the number of repetitions of a run, fixed or until the intervals are narrow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from iobench.bench.judging.comparison import rates_by_repetition
from iobench.bench.judging.stats import median, median_interval
from iobench.errors import UsageError
from iobench.results.identity import figure_of
from iobench.results.records import Sample
from iobench.units import count_of, format_seconds, parse_percent, parse_seconds

__all__ = ["Repeat"]

_AUTO = "auto"
_LEAST_AUTO = 8  # 6 of them decide: with fewer samples no interval holds the median with 95%
_DECIDING = 0.8  # the fraction of repetitions that decides: docs/statistics.md has the coverage


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """`times` repetitions. With a `precision`, `times` is the least number of repetitions.

    The run then repeats until it reaches the precision or `max_s` seconds are over. The precision
    is the width of the 95% interval of a rate, as a fraction of the median. Each contender and
    operation must reach it. Only the first four fifths of the repetitions decide, because a stop on
    a narrow interval favours samples that agree by chance. The last fifth is measured whatever it
    shows, and corrects that. The repetition in progress is finished.
    """

    times: int
    precision: float | None = None
    max_s: float | None = None

    @classmethod
    def parse(cls, repeat: str, precision: str, max_time: str) -> Repeat:
        """Parse `5`, or `auto` with `5%` and `10min`. Raises UsageError for anything else."""
        if repeat == _AUTO:
            wanted = parse_percent(precision, "--precision")
            max_s = parse_seconds(max_time, "--max-time")
            for option, value, text in (
                ("--precision", wanted, precision),
                ("--max-time", max_s, max_time),
            ):
                if not value:
                    raise UsageError(f"{option} {text}: must be above zero")
            return cls(times=_LEAST_AUTO, precision=wanted, max_s=max_s)
        if not re.fullmatch("[0-9]{1,6}", repeat) or int(repeat) < 1:
            raise UsageError(f"--repeat {repeat!r:.40}: give a number from 1 to 999999, or auto")
        return cls(times=int(repeat))

    def goes_on(self, done: int, samples: Sequence[Sample], elapsed_s: float) -> bool:
        """Return whether there is another repetition after `done` of them.

        `samples` are those of the contenders that are still measured.
        """
        if self.precision is None or self.max_s is None:
            return done < self.times
        if elapsed_s >= self.max_s:
            return done < 1
        if done < self.times:
            return True
        return _widest(samples, self.deciding(done)) > self.precision

    def deciding(self, done: int) -> int:
        """Return how many of `done` repetitions, the first ones, decide about the precision."""
        return math.floor(_DECIDING * done)

    def __str__(self) -> str:
        if self.precision is None or self.max_s is None:
            return count_of(self.times, "repetition")
        within = f"until each interval is at most {100 * self.precision:g}% wide"
        return f"{within}, at least {self.times} times, at most {format_seconds(self.max_s)}"


def _widest(samples: Sequence[Sample], repetitions: int) -> float:
    """Return the widest interval of a contender and operation, as a fraction of its median.

    Only the first `repetitions` of each count.
    """
    groups: dict[tuple[str, str, str | None], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(figure_of(sample), []).append(sample)
    widths = [0.0]
    for same in groups.values():
        counted = set(sorted({sample.repetition for sample in same})[:repetitions])
        rates = list(rates_by_repetition(s for s in same if s.repetition in counted).values())
        interval = median_interval(rates)
        if interval is not None:
            widths.append((interval.high - interval.low) / median(rates))
    return max(widths)
