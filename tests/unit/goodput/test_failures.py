"""Weibull failures: sums and ETTR against brute force, shape 1 against its closed forms."""

import math

import numpy as np
import pytest

from iobench.errors import OptionError
from iobench.goodput import goodput, intervals
from iobench.goodput.costs import Costs
from iobench.goodput.failures import Failures
from iobench.goodput.job import TrainingJob
from iobench.goodput.simulation import simulate

SYNC = Costs(blocking_s=30, restore_s=60)
ASYNC = Costs(blocking_s=2, persist_s=20, restore_s=60)
SHAPES = [0.3, 0.7, 1.5, 3.0]


def summed(failures: Failures, first_s: float, period_s: float) -> float:
    (found,) = failures.summed(np.array([first_s]), np.array([period_s]))
    return float(found)


def _renewals(
    interval_s: float, costs: Costs, job: TrainingJob, count: int = 400_000
) -> tuple[float, float]:
    """Return ETTR and lost work per failure of the running job, without formulas or random numbers.
    The times between failures are `count` quantiles of the Weibull distribution. The kept and lost
    work of each is added up."""
    scale_s = job.mtbf_s / math.gamma(1 + 1 / job.failure_shape)
    parts = (np.arange(count) + 0.5) / count
    gaps = scale_s * (-np.log1p(-parts)) ** (1 / job.failure_shape)
    runs = gaps - (job.restart_s + costs.restore_s)
    ran = runs > 0
    period_s = interval_s + costs.blocking_s
    kept = np.maximum(np.floor((runs - costs.persist_s) / period_s), 0) * interval_s
    whole, within = np.divmod(runs, period_s)
    done = whole * interval_s + np.minimum(within, interval_s)
    return kept[ran].sum() / gaps.sum(), float((done - kept)[ran].mean())


def test_shape_1_is_the_exponential_distribution() -> None:
    """The closed form is the sum. The series of a shape close to 1 gives the same."""
    for first, period in ((0.0, 50.0), (360.0, 600.0), (5000.0, 3.0)):
        closed = summed(Failures(mtbf_s=6500), first, period)
        counted = np.exp(-(first + period * np.arange(200_000)) / 6500).sum()
        assert closed == pytest.approx(counted, rel=1e-12)
        series = summed(Failures(mtbf_s=6500, shape=1 + 1e-9), first, period)
        assert series == pytest.approx(closed, rel=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_stays(shape: float) -> None:
    """The mean is the integral of the survival, here a fine sum. Drawn times have the same mean."""
    failures = Failures(mtbf_s=100.0, shape=shape)
    assert summed(failures, 0.005, 0.01) * 0.01 == pytest.approx(100.0, rel=1e-4)
    drawn = failures.draw(np.random.default_rng(3), 200_000)
    assert abs(drawn.mean() - 100) < 4 * drawn.std() / math.sqrt(drawn.size)
    assert np.median(drawn) == pytest.approx(
        failures.scale_s * math.log(2) ** (1 / shape), rel=0.05
    )


@pytest.mark.parametrize(
    ("shape", "period_s"), [(0.3, 2000), (0.3, 3), (0.7, 2000), (0.7, 0.01), (1.5, 0.001), (3, 1)]
)
def test_sums_of_many_terms(shape: float, period_s: float) -> None:
    """The integral for the rest of the series equals the sum of up to a million terms."""
    failures = Failures(mtbf_s=50.0, shape=shape)
    last_s = failures.scale_s * 40 ** (1 / shape)
    terms = failures.survival(10.0 + period_s * np.arange(math.ceil(last_s / period_s)))
    assert summed(failures, 10.0, period_s) == pytest.approx(float(terms.sum()), rel=1e-6)


@pytest.mark.parametrize("nodes", [16, 2048, 16_384])
@pytest.mark.parametrize("costs", [SYNC, ASYNC])
@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_ettr_and_lost_work_are_those_of_renewals(nodes: int, costs: Costs, shape: float) -> None:
    """An independent count over quantiles agrees, and so does the simulation."""
    job = TrainingJob(nodes=nodes, failure_shape=shape)
    interval_s = goodput.best_interval_s(costs, job)
    ettr, lost_s = _renewals(interval_s, costs, job)
    assert goodput.ettr(interval_s, costs, job) == pytest.approx(ettr, abs=2e-4)
    assert goodput.lost_work_s(interval_s, costs, job) == pytest.approx(lost_s, rel=2e-3)
    found = simulate(interval_s, costs, job, failures=100_000, seed=nodes)
    assert abs(found.ettr - ettr) < 4 * found.ettr_error
    assert found.lost_work_s is not None
    assert found.lost_work_error is not None
    assert abs(found.lost_work_s - lost_s) < 4 * found.lost_work_error + 2e-3 * lost_s


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nodes", [16, 16_384])
def test_no_interval_is_better_than_the_best(shape: float, nodes: int) -> None:
    """Compared with a thousand intervals over five orders of magnitude; Young's is worse at every
    shape."""
    job = TrainingJob(nodes=nodes, failure_shape=shape)
    best_s = goodput.best_interval_s(SYNC, job)
    best = goodput.ettr(best_s, SYNC, job)
    others = np.geomspace(best_s / 300, best_s * 300, 1001)
    assert max(goodput.ettr(float(one), SYNC, job) for one in others) <= best * (1 + 1e-9)
    assert goodput.ettr(intervals.young(30, job.mtbf_s), SYNC, job) < best


def test_at_shape_1_the_best_interval_is_the_solution_of_the_equation() -> None:
    """The numeric search, at a shape next to 1, finds it too."""
    for nodes in (16, 2048, 16_384):
        job = TrainingJob(nodes=nodes)
        exact_s = goodput.best_interval_s(SYNC, job)
        assert exact_s == intervals.optimal(30, job.mtbf_s)
        near = TrainingJob(nodes=nodes, failure_shape=1 + 1e-9)
        assert goodput.best_interval_s(SYNC, near) == pytest.approx(exact_s, rel=1e-3)


def test_failures_in_groups_make_intervals_longer_and_losses_smaller() -> None:
    """Most times between failures are short and lost anyway; the long ones need fewer saves."""
    one, groups = (TrainingJob(nodes=2048, failure_shape=shape) for shape in (1.0, 0.7))
    first, second = (goodput.best_interval_s(SYNC, job) for job in (one, groups))
    assert second > first
    assert goodput.ettr(second, SYNC, groups) > goodput.ettr(first, SYNC, one)


def test_limits_of_the_search() -> None:
    """The slot limit holds, also for saves that do not block. A job that never runs has no NaN."""
    limited = Costs(blocking_s=1, persist_s=3600, restore_s=60)
    job = TrainingJob(nodes=2048, failure_shape=0.7)
    assert goodput.best_interval_s(limited, job) == intervals.shortest(limited) == 3600
    free = Costs(blocking_s=0, persist_s=20, restore_s=60)
    assert goodput.best_interval_s(free, job) == 20
    stuck = TrainingJob(nodes=131_072, failure_shape=3.0)
    slow = Costs(blocking_s=1e6, restore_s=1e6)
    interval_s = goodput.best_interval_s(slow, stuck)
    assert goodput.ettr(interval_s, slow, stuck) == 0
    assert goodput.lost_work_s(interval_s, slow, stuck) == 0


@pytest.mark.parametrize("shape", [0.0, 0.29, 3.1, -1.0, math.nan, math.inf])
def test_a_shape_out_of_range_is_refused(shape: float) -> None:
    with pytest.raises(OptionError, match=r"failure-shape must be from 0\.3 to 3"):
        TrainingJob(nodes=1, failure_shape=shape)
