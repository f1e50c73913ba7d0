"""Over time: the rate of saves that follow each other, where it changes, and whether it is steady.

A device with a cache or with burst credits is fast at first. A round is a minute of saves, as in
the throughput test of SNIA (Solid State Storage Performance Test Specification 2.0.1), or a tenth
of a run that is shorter than 10 minutes. Its rate is that of all saves that begin in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from iobench.results.identity import groups
from iobench.results.records import Sample
from iobench.stats.change import find_change
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
    return all(_is_steady(_state(same, round_s, began_s)) for same in series.values())


def over_time(saves: Sequence[Sample], of_run: Sequence[Sample], round_s: float) -> OverTime:
    """Return how the rate of `saves` went; `of_run` are all saves of the run and target."""
    saves = sorted(saves, key=start_of)
    began_s = min(map(start_of, of_run))
    over_s = start_of(saves[-1]) + saves[-1].elapsed_s
    elapsed_s = over_s - began_s
    during = (one.elapsed_s for one in of_run if start_of(one) < over_s)
    rounds, state = rates_by_round(saves, round_s, began_s), _state(saves, round_s, began_s)
    return OverTime(
        elapsed_s=elapsed_s,
        saving=min(1.0, sum(during) / elapsed_s),
        round_s=round_s,
        rounds=len(rounds),
        range=state.range if state else None,
        slope=state.slope if state else None,
        steady=_is_steady(state),
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


def _state(saves: Sequence[Sample], round_s: float, began_s: float) -> SteadyState | None:
    return steady_state(rates_by_round(saves, round_s, began_s))


def _is_steady(state: SteadyState | None) -> bool:
    return state is not None and state.steady


def start_of(sample: Sample) -> float:
    """Return when the clock of `sample` started, in seconds since 1970."""
    return datetime.fromisoformat(sample.started_at).timestamp()
