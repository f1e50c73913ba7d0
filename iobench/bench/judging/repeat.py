"""Repeat: how often a run repeats: a number of times, until intervals are narrow, or for a time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from iobench.bench.targets.settle import Patience
from iobench.errors import UsageError
from iobench.results.identity import groups
from iobench.results.records import Sample
from iobench.stats.comparison import rates_by_repetition
from iobench.stats.estimates import median, median_interval
from iobench.stats.over_time import all_steady, round_length
from iobench.units import (
    TIB,
    count_of,
    format_seconds,
    format_size,
    parse_percent,
    parse_seconds,
    parse_size,
)

_AUTO, _STEADY = "auto", "steady"
_DEFAULT_PRECISION = 0.05
_DEFAULT_DURATION = "10min"
_DEFAULT_BYTES = TIB
_SUSTAINED_TIMES = 100  # saves of each contender that show when the rate changes, to 1% of the time
_LEAST_AUTO = 8  # 6 of them decide: with fewer samples no interval holds the median with 95%
_DECIDING = 0.8  # of the repetitions, the first ones, decide: docs/statistics.md has the coverage


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """`times` repetitions. With a `precision`, `times` is the least number of repetitions.

    The run then repeats until it reaches the precision or `max_s` seconds are over. The precision
    is the width of the 95% interval of a rate, as a fraction of the median. Each contender and
    operation must reach it. Only the first four fifths of the repetitions decide, because a stop on
    a narrow interval favours samples that agree by chance. The last fifth is measured whatever it
    shows, and corrects that. The repetition in progress is finished.

    With a `max_s` and no precision, saves follow each other for `max_s` seconds, and `times` is
    about how many of each contender there are when the size is chosen. With `until_steady` they end
    at a steady state (see `over_time`). They end before they write more than `max_bytes`, after
    `most` repetitions. Only the first one has restores: a cache or burst credits recover in them.
    """

    times: int
    precision: float | None = None
    max_s: float | None = None
    until_steady: bool = False
    max_bytes: int | None = None
    most: int | None = None

    @classmethod
    def parse(cls, repeat: str) -> Repeat:
        """Parse `5`, `auto`, `auto:2%`, `auto:1h` or `auto:2%,1h`. Raises UsageError otherwise."""
        word, colon, limits = repeat.partition(":")
        if word == _AUTO:
            precision, max_s = _DEFAULT_PRECISION, parse_seconds(_DEFAULT_DURATION, "--repeat")
            for text in limits.split(",") if colon else ():
                if text.endswith("%"):
                    value = precision = parse_percent(text, "--repeat auto:")
                else:
                    value = max_s = parse_seconds(text, "--repeat auto:")
                if not value:
                    raise UsageError(f"--repeat auto:{limits:.40}: {text} must be above zero")
            if precision >= 1:
                raise UsageError(f"--repeat auto:{limits:.40}: the width must be below 100%")
            return cls(times=_LEAST_AUTO, precision=precision, max_s=max_s)
        if not re.fullmatch("[0-9]{1,6}", repeat) or int(repeat) < 1:
            raise UsageError(
                f"--repeat {repeat!r:.40}: give a number from 1 to 999999, auto or auto:5%,10min"
            )
        return cls(times=int(repeat))

    @classmethod
    def sustained(cls, duration: str | None, until: str | None, max_bytes: str | None) -> Self:
        """Parse `10min`, `steady` and `1TiB`. Raises UsageError for anything else."""
        text = duration or _DEFAULT_DURATION
        max_s = parse_seconds(text, "--duration")
        if not max_s:
            raise UsageError(f"--duration {text}: must be above zero")
        if until not in (None, _STEADY):
            raise UsageError(f"--until {until!r:.40}: choose {_STEADY}")
        most = _DEFAULT_BYTES if max_bytes is None else parse_size(max_bytes, "--max-bytes")
        return cls(
            times=_SUSTAINED_TIMES, max_s=max_s, until_steady=until is not None, max_bytes=most
        )

    @property
    def is_sustained(self) -> bool:
        """Whether saves follow each other for a time."""
        return self.max_s is not None and self.precision is None

    def writing(self, repetition_bytes: int, earlier_bytes: int = 0) -> Self:
        """Return the same with the repetitions of `repetition_bytes` that `max_bytes` allows.

        `earlier_bytes` are written before the first one. Raises UsageError where it allows none.
        """
        if self.max_bytes is None or not repetition_bytes:
            return self
        most = (self.max_bytes - earlier_bytes) // repetition_bytes
        if most < 1:
            raise UsageError(
                f"--max-bytes {format_size(self.max_bytes)}: one save by each writer is "
                f"{format_size(repetition_bytes)}; choose a smaller --size"
            )
        return replace(self, most=most)

    @property
    def stored(self) -> int:
        """How many checkpoints of each target exist at once: one stays while the next is saved."""
        return 2 if self.is_sustained else 1

    def patience(self) -> Patience:
        """Return how long an operation waits for an idle device."""
        return Patience(0.0) if self.is_sustained else Patience()

    def restores(self, repetition: int) -> bool:
        """Return whether the checkpoints of a repetition, from 0 on, are restored too."""
        return repetition == 0 or not self.is_sustained

    def goes_on(self, done: int, samples: Sequence[Sample], elapsed_s: float) -> bool:
        """Return whether there is another repetition after `done` of them.

        `samples` are those of the contenders that are still measured.
        """
        if self.max_s is None:
            return done < self.times
        if self.precision is None:
            if elapsed_s >= self.max_s or (self.most is not None and done >= self.most):
                return done < 1
            steady = self.until_steady and all_steady(samples, round_length(self.max_s))
            return done < 1 or not steady
        if elapsed_s >= self.max_s:
            return done < 1
        if done < self.times:
            return True
        return _widest(samples, math.floor(_DECIDING * done)) > self.precision

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a plan; `round_s` is there where saves follow each other."""
        asked = {"repeat": self.times, "precision": self.precision, "max_s": self.max_s}
        if not self.is_sustained:
            return asked
        assert self.max_s is not None
        return asked | {
            "repeat": None,
            "until": _STEADY if self.until_steady else None,
            "round_s": round_length(self.max_s),
            "max_bytes": self.max_bytes,
        }

    def __str__(self) -> str:
        if self.max_s is None:
            return count_of(self.times, "repetition")
        if self.precision is None:
            first = "until they are steady, at most " if self.until_steady else ""
            return f"saves follow each other {first or 'for '}{format_seconds(self.max_s)}"
        within = f"until each interval is at most {100 * self.precision:g}% wide"
        return f"{within}, at least {self.times} times, at most {format_seconds(self.max_s)}"


def _widest(samples: Sequence[Sample], repetitions: int) -> float:
    """Return the widest interval of a contender and operation, as a fraction of its median.

    Only the first `repetitions` of each count.
    """
    widths = [0.0]
    for same in groups(samples).values():
        counted = set(sorted({sample.repetition for sample in same})[:repetitions])
        rates = list(rates_by_repetition(s for s in same if s.repetition in counted).values())
        interval = median_interval(rates)
        if interval is not None:
            widths.append((interval.high - interval.low) / median(rates))
    return max(widths)
