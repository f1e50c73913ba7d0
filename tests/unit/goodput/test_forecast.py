"""Forecasts: the best formula, saved time computed by hand, intervals and warnings."""

import io
from dataclasses import replace

import pytest

from iobench.bench.judging.stats import Interval
from iobench.errors import OptionError
from iobench.goodput import goodput
from iobench.goodput.costs import Costs
from iobench.goodput.forecast import Forecast, Method, forecast
from iobench.goodput.job import MONTH_S, TrainingJob
from iobench.goodput.measured import SavingMethod, from_results
from iobench.report.forecast import write
from iobench.report.outlook import Outlook
from iobench.report.render import DocumentFormat
from iobench.results import ResultFile

QUICK = Method(failures=20_000)
JOB = TrainingJob(nodes=2048)
SLOW = SavingMethod(name="slow", costs=Costs(blocking_s=60, restore_s=60))
FAST = SavingMethod(name="fast", costs=Costs(blocking_s=10, restore_s=30))


def texts(one: Forecast) -> str:
    return "; ".join(map(str, one.warnings))


def one(costs: Costs, job: TrainingJob, method: Method = QUICK) -> Forecast:
    candidate = SavingMethod(name="one", costs=costs)
    return forecast([candidate], candidate, job, method)[0]


def test_the_best_is_the_best_of_the_proposals() -> None:
    for found in forecast([SLOW, FAST], SLOW, JOB, QUICK):
        assert [p.formula for p in found.proposals] == [
            *("best", "Young", "Daly", "availability", "CheckFreq")
        ]
        assert found.best.ettr == max(p.ettr for p in found.proposals)
        assert found.lost_work_s == goodput.lost_work_s(
            found.best.interval_s, found.candidate.costs, JOB
        )
        assert not found.warnings


def test_what_is_saved_by_hand() -> None:
    """The same work takes ETTR_slow / ETTR_fast of the time; on 16,384 GPUs."""
    slow, fast = forecast([SLOW, FAST], SLOW, JOB, QUICK)
    assert slow.baseline
    assert slow.saved is None
    assert not fast.baseline
    assert fast.saved is not None
    assert fast.saved.wall_s == pytest.approx(MONTH_S * (1 - slow.best.ettr / fast.best.ettr))
    assert fast.saved.gpu_hours == pytest.approx(fast.saved.wall_s / 3600 * 16_384)
    assert fast.saved.wall_s_interval is None


def test_a_slower_writer_saves_less_than_nothing() -> None:
    slow, _ = forecast([SLOW, FAST], FAST, JOB, QUICK)
    assert slow.saved is not None
    assert slow.saved.wall_s < 0


def test_intervals_come_from_the_resampled_medians(example: ResultFile) -> None:
    """They contain the figure. Their bounds are those of the fastest and slowest samples."""
    candidates, _ = from_results(example, size_bytes=2**36)
    odirect, buffered = forecast(candidates, candidates[1], JOB, Method(failures=0))
    for found in (odirect, buffered):
        assert found.ettr_interval is not None
        assert found.interval_s_interval is not None
        assert found.best.ettr in found.ettr_interval
        assert found.best.interval_s in found.interval_s_interval
        assert found.ettr_interval.low < found.ettr_interval.high
        assert found.best.simulated is None
    best = min(odirect.candidate.resampled, key=lambda costs: costs.blocking_s + costs.restore_s)
    most = one(best, JOB, Method(failures=0)).best.ettr
    assert odirect.ettr_interval is not None
    assert odirect.best.ettr < odirect.ettr_interval.high <= most
    assert odirect.saved is not None
    assert odirect.saved.gpu_hours_interval is not None
    assert odirect.saved.gpu_hours in odirect.saved.gpu_hours_interval


def test_intervals_below_the_slot_limit_are_raised_to_it() -> None:
    costs = Costs(blocking_s=1, persist_s=3600, restore_s=60)
    found = one(costs, JOB)
    assert found.best.raised
    assert found.best.interval_s == 3600
    assert "the persist time sets the interval" in texts(found)
    assert not one(Costs(blocking_s=1, persist_s=3600, restore_s=60, slots=60), JOB).best.raised


def test_it_says_where_assumptions_break() -> None:
    """A save takes half an hour, and a failure comes every 13 minutes."""
    found = one(Costs(blocking_s=1800, restore_s=900), TrainingJob(nodes=16_384))
    said = texts(found)
    assert "not far below the MTBF" in said
    assert "Daly's formula returns the MTBF" in said
    assert "recovery takes longer than the MTBF" in said
    near = one(Costs(blocking_s=120, restore_s=120), TrainingJob(nodes=16_384))
    assert "the first-order ETTR is too low (by 0." in texts(near)
    assert "believe neither" not in texts(near)


def test_a_formula_that_the_simulation_denies_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = goodput.ettr
    monkeypatch.setattr(goodput, "ettr", lambda *given: right(*given) * 0.95)
    assert "believe neither" in texts(one(FAST.costs, JOB))


def test_too_few_saves_check_nothing() -> None:
    found = one(Costs(blocking_s=1800, restore_s=900), TrainingJob(nodes=131_072))
    assert "too few simulated saves became durable to check the best interval" in texts(found)


def test_a_job_that_gets_nowhere_has_nothing_to_save() -> None:
    costs = Costs(blocking_s=1e6, restore_s=1e6)
    stuck = SavingMethod(name="stuck", costs=costs)
    found = forecast([stuck, FAST], stuck, TrainingJob(nodes=131_072), QUICK)
    assert [one.saved for one in found] == [None, None]


@pytest.mark.parametrize(
    "wrong", [{"budget": 0.0}, {"budget": float("nan")}, {"step_s": 0.0}, {"failures": 1}]
)
def test_a_method_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Method(**wrong)


def test_an_interval_that_is_given_is_judged_like_the_formulas_own() -> None:
    """Its ETTR is that of the exact formula, and lower than at the best interval."""
    costs = Costs(blocking_s=30, restore_s=60)
    found = one(costs, JOB, Method(failures=1000, interval_s=7200.0))
    given = found.proposals[-1]
    assert (given.formula, given.interval_s, given.raised) == ("given", 7200.0, False)
    assert given.ettr == goodput.ettr(7200.0, costs, JOB) < found.best.ettr
    assert given.simulated is not None
    limited = one(Costs(blocking_s=1, persist_s=3600, restore_s=60), JOB, Method(interval_s=60.0))
    assert (limited.proposals[-1].interval_s, limited.proposals[-1].raised) == (3600, True)
    with pytest.raises(OptionError, match="--interval must be above zero"):
        Method(interval_s=0.0)


def test_a_shape_is_compared_with_a_constant_rate() -> None:
    """The exact optimum of shape 1, evaluated at shape 1 and at the job's shape."""
    constant, shaped = TrainingJob(nodes=2048), TrainingJob(nodes=2048, failure_shape=0.7)
    at_1, found = one(SLOW.costs, constant), one(SLOW.costs, shaped)
    assert (at_1.constant_rate, at_1.interval_method) == (None, "equation")
    assert found.interval_method == "numeric"
    assert found.constant_rate is not None
    assert (found.constant_rate.interval_s, found.constant_rate.ettr) == (
        at_1.best.interval_s,
        at_1.best.ettr,
    )
    assert found.constant_rate.ettr_change == found.best.ettr - at_1.best.ettr
    assert found.constant_rate.ettr_change_interval is None
    best, second = found.proposals[:2]
    assert (second.formula, second.interval_s) == ("constant rate", at_1.best.interval_s)
    assert best.ettr == max(p.ettr for p in found.proposals) > second.ettr
    assert "believe neither" not in texts(found)
    limited = one(Costs(blocking_s=1, persist_s=3600, restore_s=60), shaped)
    assert (limited.best.raised, limited.interval_method) == (True, "slots")
    assert "the persist time sets the interval" in texts(limited)


def test_a_change_that_may_be_none_has_its_interval() -> None:
    """A figure is printed with its interval if the interval includes 0."""
    found = one(SLOW.costs, TrainingJob(nodes=2048, failure_shape=0.7))
    assert found.constant_rate is not None

    def heading(spread: Interval | None) -> str:
        assert found.constant_rate is not None
        changed = replace(found.constant_rate, ettr_change_interval=spread)
        text = io.StringIO()
        outlook = Outlook(
            title="given",
            method=QUICK,
            forecasts=(replace(found, constant_rate=changed),),
            notes=(),
        )
        write(outlook, DocumentFormat.TABLE, text)
        return text.getvalue()

    assert "(the change is -0.2 to +0.1 points)." in heading(Interval(-0.001, 0.002))
    assert "the change is" not in heading(Interval(0.001, 0.002))
    assert "the change is" not in heading(None)
