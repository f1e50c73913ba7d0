"""Saves that follow each other, in words: rates before and after a change, the steady state."""

from __future__ import annotations

from collections.abc import Iterator

from iobench.bench.judging.over_time import OverTime, RateChange
from iobench.report.row import Summary
from iobench.report.winners import RANKED
from iobench.units import format_rate, format_seconds, format_size

__all__ = ["over_time_lines"]


def over_time_lines(one: Summary) -> Iterator[str]:
    """Yield lines about the saves of a contender; none where they do not follow each other, or
    where its figure does not count."""
    over_time = one.over_time
    if over_time is None or one.verdict not in RANKED:
        return
    whole = format_seconds(over_time.elapsed_s)
    if over_time.change is None:
        yield f"{one.label}: no change seen in {whole}, {format_rate(one.median_bytes_per_s)}"
    else:
        yield from _change(one.label, over_time.change)
    yield f"{_steady(over_time)}; saves took {100 * over_time.saving:.0f}% of {whole}"


def _change(label: str, change: RateChange) -> Iterator[str]:
    before, after = format_rate(change.before_bytes_per_s), format_rate(change.after_bytes_per_s)
    yield f"{label}: {before} for {format_seconds(change.at_s)}, then {after}"
    low, high = map(format_seconds, change.at_s_ci95)
    yield f"the change is between {low} and {high}, after {format_size(change.written_bytes)}"


def _steady(over_time: OverTime) -> str:
    rounds = f"rounds of {format_seconds(over_time.round_s)}"
    if over_time.range is None or over_time.slope is None:
        return f"not known to be steady: {over_time.rounds} of 5 {rounds}"
    moved = f"range {100 * over_time.range:.0f}%, drift {100 * over_time.slope:.0f}%"
    state = "steady" if over_time.steady else "not steady"
    return f"{state} in the last 5 {rounds} ({moved})"
