"""The number of repetitions: fixed, or until the intervals are narrow enough."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from iobench.bench.judging.repeat import Repeat
from iobench.errors import OptionError, UsageError
from iobench.results import Sample, read
from iobench.stats.estimates import median_interval
from iobench.units import MIB

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = next(sample for sample in EXAMPLE.samples if sample.operation == "save")
AUTO = Repeat.parse("auto")


def taking(*seconds: float, writer: str = "odirect") -> list[Sample]:
    return [
        replace(
            SAVE, repetition=number, elapsed_s=elapsed, setting=replace(SAVE.setting, writer=writer)
        )
        for number, elapsed in enumerate(seconds)
    ]


def test_a_number_of_times() -> None:
    three = Repeat.parse("3")
    assert (str(three), str(Repeat.parse("1"))) == ("3 repetitions", "1 repetition")
    assert [three.goes_on(done, [], 1e9) for done in range(4)] == [True, True, True, False]


def test_auto_ends_when_every_interval_is_narrow() -> None:
    narrow, wide = taking(*[1.0, 1.02] * 4), taking(*[1.0, 1.2] * 4, writer="buffered")
    assert not AUTO.goes_on(8, narrow, 1)
    assert AUTO.goes_on(8, [*narrow, *wide], 1)
    assert Repeat.parse("auto:1%").goes_on(8, narrow, 1)


def test_the_last_fifth_of_the_repetitions_decides_nothing() -> None:
    """It neither prolongs a run nor ends it."""
    agree, differ = [1.0, 1.02] * 3, [1.0, 1.2] * 3
    assert not AUTO.goes_on(8, taking(*agree, 1.5, 1.5), 1)
    assert AUTO.goes_on(8, taking(*differ, 1.1, 1.1), 1)


def test_the_interval_of_an_automatic_run_covers_the_true_median() -> None:
    """It stops when the interval is narrow enough. docs/statistics.md has the coverage for other
    noise."""
    random, covered, runs = np.random.default_rng(2), 0, 200
    for _ in range(runs):
        seconds = np.exp(random.normal(0, 0.03, 60)).tolist()
        done = next(n for n in range(1, 60) if not AUTO.goes_on(n, taking(*seconds[:n]), 1))
        interval = median_interval(seconds[:done])
        covered += interval is not None and 1.0 in interval
    assert covered >= 0.94 * runs


def test_auto_takes_eight_samples_at_least() -> None:
    assert AUTO.goes_on(7, taking(*[1.0] * 7), 1)
    assert not AUTO.goes_on(8, taking(*[1.0] * 8), 1)


def test_auto_ends_when_its_time_is_over() -> None:
    wide = taking(*[1.0, 2.0] * 3)
    assert AUTO.goes_on(6, wide, 599)
    assert not AUTO.goes_on(6, wide, 600)
    assert not AUTO.goes_on(1, wide, 600)
    assert AUTO.goes_on(0, [], 600)  # nothing measured is no result


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "", "3:5%", "auto3"])
def test_what_is_no_number_of_times(text: str) -> None:
    with pytest.raises(UsageError, match="--repeat"):
        Repeat.parse(text)


def test_the_limits_of_auto() -> None:
    limits = [Repeat.parse(f"auto:{one}") for one in ("2%", "1h", "2%,1h", "1h,2%")]
    found = [(one.precision, one.max_s) for one in limits]
    assert found == [(0.02, 600), (0.05, 3600), (0.02, 3600), (0.02, 3600)]
    for text, message in (
        ("0.05", "auto: '0.05' has no unit"),
        ("x%", "auto: 'x%' is not a percentage"),
        ("soon", "auto: 'soon' is not a time"),
        ("", "auto: '' is not a time"),
        ("5%,", "auto: '' is not a time"),
    ):
        with pytest.raises(OptionError, match=message):
            Repeat.parse(f"auto:{text}")
    with pytest.raises(UsageError, match="--repeat auto:0%: 0% must be above zero"):
        Repeat.parse("auto:0%")
    with pytest.raises(UsageError, match="--repeat auto:5%,0s: 0s must be above zero"):
        Repeat.parse("auto:5%,0s")


def test_saves_follow_each_other_for_a_time() -> None:
    """There is always one, and none begins after the time or above the bytes."""
    ten = Repeat.sustained("10min", None, "1GiB")
    assert [ten.goes_on(1, [], elapsed_s) for elapsed_s in (0, 599, 600)] == [True, True, False]
    assert ten.goes_on(0, [], 1e9)
    three = ten.writing(300 * MIB)
    assert [three.goes_on(done, [], 1.0) for done in (2, 3)] == [True, False]
    assert str(ten) == "saves follow each other for 10 min 0 s"


def test_saves_end_at_a_steady_state() -> None:
    """The rounds of 20 s are 2 s long: each has a save."""
    until = Repeat.sustained("20s", "steady", None)
    steady = taking(*[2.5] * 6)
    started = datetime(2026, 1, 31, tzinfo=UTC)
    at = [(started + timedelta(seconds=2.5 * n)).isoformat() for n in range(6)]
    samples = [replace(one, started_at=text) for one, text in zip(steady, at, strict=True)]
    assert until.goes_on(4, samples[:4], 10.0)
    assert not until.goes_on(6, samples, 15.0)
    assert Repeat.sustained("20s", None, None).goes_on(6, samples, 15.0)
    assert str(until) == "saves follow each other until they are steady, at most 20 s"


def test_only_the_first_of_saves_that_follow_each_other_is_restored() -> None:
    sustained, fixed = Repeat.sustained("1min", None, None), Repeat(times=3)
    assert [sustained.restores(number) for number in range(3)] == [True, False, False]
    assert all(fixed.restores(number) for number in range(3))
    assert (sustained.patience().seconds, fixed.patience().seconds) == (0.0, 3.0)


def test_what_a_plan_has_of_it() -> None:
    """Older plans have no other fields, and a plan without a number of repetitions says so."""
    assert Repeat(times=3).to_dict() == {"repeat": 3, "precision": None, "max_s": None}
    assert Repeat.sustained(None, "steady", "4GiB").to_dict() == {
        "repeat": None,
        "precision": None,
        "max_s": 600.0,
        "until": "steady",
        "round_s": 60.0,
        "max_bytes": 4 << 30,
    }
