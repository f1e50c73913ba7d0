"""Repeat: how often everything is measured: a number of times, or until the figures are sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iobench.bench.judging.stats import bootstrap_median_interval, median, rate
from iobench.errors import UsageError
from iobench.results.identity import figure_of
from iobench.results.records import Sample
from iobench.units import format_seconds, parse_percent, parse_seconds

__all__ = ["Repeat"]

_AUTO = "auto"
_LEAST_AUTO = 6  # of fewer samples no interval holds the median with 95 %


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """`times`, or with a `precision` at least so often, until it is reached or `max_s` are over.

    The precision is reached when of every contender and operation the 95 % interval of the rate,
    from end to end, is at most this part of the median. The repetition that runs is finished.
    """

    times: int
    precision: float | None = None
    max_s: float | None = None

    @classmethod
    def parse(cls, repeat: str, precision: str, max_time: str) -> Repeat:
        """From `5`, or `auto` with `5%` and `10min`. Raises UsageError for anything else."""
        if repeat == _AUTO:
            wanted, max_s = parse_percent(precision), parse_seconds(max_time)
            return cls(times=_LEAST_AUTO, precision=wanted, max_s=max_s)
        if not repeat.isdecimal() or int(repeat) < 1:
            raise UsageError(f"--repeat {repeat!r}: give a number of at least 1, or auto")
        return cls(times=int(repeat))

    def goes_on(self, done: int, samples: Sequence[Sample], elapsed_s: float) -> bool:
        """Whether there is another repetition after `done` of them.

        `samples` are those of the contenders that are still measured.
        """
        if self.precision is None or self.max_s is None:
            return done < self.times
        if elapsed_s >= self.max_s:
            return done < 1
        return done < self.times or _widest(samples) > self.precision

    def __str__(self) -> str:
        if self.precision is None or self.max_s is None:
            return f"{self.times} repetitions"
        within = f"until the intervals are within {100 * self.precision:g} %"
        return f"{within}, at least {self.times} times, at most {format_seconds(self.max_s)}"


def _widest(samples: Sequence[Sample]) -> float:
    """The widest interval of a contender and operation, as a part of its median."""
    groups: dict[tuple[str, str, str | None], list[float]] = {}
    for sample in samples:
        rates = groups.setdefault(figure_of(sample), [])
        rates.append(rate(sample.bytes, sample.elapsed_s))
    widths = [0.0]
    for rates in groups.values():
        interval = bootstrap_median_interval(rates)
        if interval is not None:
            widths.append((interval.high - interval.low) / median(rates))
    return max(widths)
