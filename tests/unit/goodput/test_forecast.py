"""Forecasts: the best formula, saved time computed by hand, intervals and warnings."""

import pytest

from iobench.goodput import goodput
from iobench.goodput.forecast import Forecast, forecast
from iobench.goodput.goodput import MONTH_S, Costs, TrainingJob
from iobench.goodput.measured import SavingMethod, from_results
from iobench.results import ResultFile

JOB = TrainingJob(nodes=2048)
SLOW = SavingMethod(name="slow", costs=Costs(blocking_s=60, restore_s=60))
FAST = SavingMethod(name="fast", costs=Costs(blocking_s=10, restore_s=30))


def texts(one: Forecast) -> str:
    return "; ".join(map(str, one.warnings))


def one(costs: Costs, job: TrainingJob, asked_s: float | None = None) -> Forecast:
    candidate = SavingMethod(name="one", costs=costs)
    return forecast([candidate], candidate, job, asked_s)[0]


def test_no_interval_is_better_than_the_best() -> None:
    for found in forecast([SLOW, FAST], SLOW, JOB):
        costs, best = found.candidate.costs, found.best
        for factor in (0.5, 0.99, 1.01, 2.0):
            assert goodput.ettr(factor * best.interval_s, costs, JOB) < best.ettr
        assert found.lost_work_s == goodput.lost_work_s(best.interval_s, costs, JOB)
        assert found.given is None
        assert not found.warnings


def test_what_is_saved_by_hand() -> None:
    """The same work takes ETTR_slow / ETTR_fast of the time. A slower writer saves
    less than nothing, and a job that gets nowhere has nothing to save."""
    slow, fast = forecast([SLOW, FAST], SLOW, JOB)
    assert (slow.baseline, slow.saved, fast.baseline) == (True, None, False)
    assert fast.saved is not None
    assert fast.saved.wall_s == pytest.approx(MONTH_S * (1 - slow.best.ettr / fast.best.ettr))
    assert fast.saved.wall_s_interval is None
    slow, _ = forecast([SLOW, FAST], FAST, JOB)
    assert slow.saved is not None
    assert slow.saved.wall_s < 0
    stuck = SavingMethod(name="stuck", costs=Costs(blocking_s=1e6, restore_s=1e6))
    found = forecast([stuck, FAST], stuck, TrainingJob(nodes=131_072))
    assert [one.saved for one in found] == [None, None]


def test_intervals_come_from_the_resampled_medians(example: ResultFile) -> None:
    """They contain the figure. Their bounds are those of the fastest and slowest samples."""
    candidates, _ = from_results(example, size_bytes=2**36)
    odirect, buffered = forecast(candidates, candidates[1], JOB)
    for found in (odirect, buffered):
        assert found.ettr_interval is not None
        assert found.interval_s_interval is not None
        assert found.best.ettr in found.ettr_interval
        assert found.best.interval_s in found.interval_s_interval
        assert found.ettr_interval.low < found.ettr_interval.high
    best = min(odirect.candidate.resampled, key=lambda costs: costs.blocking_s + costs.restore_s)
    most = one(best, JOB).best.ettr
    assert odirect.ettr_interval is not None
    assert odirect.best.ettr < odirect.ettr_interval.high <= most
    assert odirect.saved is not None
    assert odirect.saved.wall_s_interval is not None
    assert odirect.saved.wall_s in odirect.saved.wall_s_interval


def test_warnings() -> None:
    """Intervals below the persist time are raised to it. A job cannot train where a restore takes a
    quarter of an hour, and a failure comes every 13 minutes."""
    found = one(Costs(blocking_s=1, persist_s=3600, restore_s=60), JOB)
    assert (found.best.raised, found.best.interval_s) == (True, 3600)
    assert "the persist time sets the interval" in texts(found)
    assert not one(Costs(blocking_s=1, persist_s=60, restore_s=60), JOB).best.raised
    large = TrainingJob(nodes=16_384)
    stuck = one(Costs(blocking_s=1800, restore_s=900), large)
    assert "recovery takes longer than the MTBF" in texts(stuck)
    assert texts(one(Costs(blocking_s=120, restore_s=120), large)) == ""


def test_an_interval_that_is_given_is_judged_too() -> None:
    """Its ETTR is that of the exact formula, and lower than at the best interval."""
    costs = Costs(blocking_s=30, restore_s=60)
    found = one(costs, JOB, 7200.0)
    assert found.given is not None
    assert (found.given.interval_s, found.given.raised) == (7200.0, False)
    assert found.given.ettr == goodput.ettr(7200.0, costs, JOB) < found.best.ettr
    limited = one(Costs(blocking_s=1, persist_s=3600, restore_s=60), JOB, 60.0)
    assert limited.given is not None
    assert (limited.given.interval_s, limited.given.raised) == (3600, True)
