"""Saves that follow each other: rounds, a steady state, and the rates before and after a change."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from iobench.results import Sample, read
from iobench.stats.over_time import all_steady, over_time, rates_by_round, round_length

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = next(sample for sample in EXAMPLE.samples if sample.operation == "save")
BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)


def saves(*seconds: float, pause_s: float = 0.0, writer: str = "odirect") -> list[Sample]:
    """Saves of 1000 bytes that take so long, one after the other."""
    made, at_s = [], 0.0
    for number, elapsed_s in enumerate(seconds):
        made.append(
            replace(
                SAVE,
                repetition=number,
                bytes=1000,
                elapsed_s=elapsed_s,
                setting=replace(SAVE.setting, writer=writer),
                started_at=(BEGAN + timedelta(seconds=at_s)).isoformat(),
            )
        )
        at_s += elapsed_s + pause_s
    return made


def test_a_round_is_a_minute_or_a_tenth_of_the_run() -> None:
    assert [round_length(duration_s) for duration_s in (3600, 600, 20)] == [60, 60, 2]


def test_a_round_has_the_saves_that_begin_in_it() -> None:
    """Its rate is bytes over time of saving; the last round of 10 s has not passed."""
    series = saves(2.0, 2.0, 4.0, 4.0, 5.0, 5.0, 3.0)  # begin at 0, 2, 4, 8, 12, 17, 22
    rates = rates_by_round(series, 10.0, BEGAN.timestamp())
    assert rates == pytest.approx([4000 / 12.0, 2000 / 10.0])


def test_a_save_that_is_longer_than_a_round_is_one() -> None:
    rates = rates_by_round(saves(25.0, 50.0), 10.0, BEGAN.timestamp())
    assert rates == pytest.approx([1000 / 25.0, 1000 / 50.0])


def test_all_contenders_must_be_steady() -> None:
    steady, moving = saves(*[1.0] * 6), saves(*[1.0, 2.0] * 4, writer="buffered")
    assert all_steady(steady, 1.0)
    assert not all_steady([*steady, *moving], 1.0)
    assert not all_steady(saves(*[1.0] * 4), 1.0)
    assert not all_steady([], 1.0)


def test_the_rates_before_and_after_a_change() -> None:
    """Six saves of 1 s, then twelve of 4 s, with pauses of 0.5 s."""
    series = saves(*[1.0] * 6, *[4.0] * 12, pause_s=0.5)
    found = over_time(series, series, 5.0)
    change = found.change
    assert change is not None
    assert (change.before_bytes_per_s, change.after_bytes_per_s) == pytest.approx((1000, 250))
    assert change.at_s == pytest.approx(9.0)
    assert change.at_s_ci95 == pytest.approx((7.5, 13.0))
    assert change.written_bytes == 6000
    assert found.elapsed_s == pytest.approx(62.5)
    assert found.saving == pytest.approx(54 / 62.5)
    assert found.steady


def test_bytes_until_a_change_are_those_of_all_contenders() -> None:
    """They share the cache and the credits."""
    series, others = saves(*[1.0] * 6, *[4.0] * 6), saves(*[1.0] * 6, *[4.0] * 6, writer="buffered")
    change = over_time(series, [*series, *others], 5.0).change
    assert change is not None
    assert change.written_bytes == 12_000


def test_the_part_of_saving_is_that_of_all_contenders_in_this_time() -> None:
    """The other one goes on for 8 s after the end of the last save."""
    series, others = saves(1.0, pause_s=1.0), saves(1.0, 8.0, pause_s=1.0, writer="buffered")
    later = [replace(s, started_at=_later(s, 1.0)) for s in others]
    again = replace(series[0], started_at=_later(series[0], 2.0))
    found = over_time([*series, again], later, 1.0)
    assert found.saving == pytest.approx(0.5)


def _later(save: Sample, seconds: float) -> str:
    return (datetime.fromisoformat(save.started_at) + timedelta(seconds=seconds)).isoformat()


def test_equal_saves_have_no_change() -> None:
    series = saves(*[1.0, 1.02, 0.99] * 4)
    found = over_time(series, series, 1.0)
    assert found.change is None
    assert found.steady
    assert over_time(series[:3], series[:3], 1.0).range is None
