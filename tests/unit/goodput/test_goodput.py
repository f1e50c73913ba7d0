"""ETTR, lost work, failure rates and the best interval: values computed by hand, published figures
and formulas, brute force and limits."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import workloads
from iobench.errors import OptionError
from iobench.goodput import goodput
from iobench.goodput.goodput import DAY_S, Costs, TrainingJob

costs = st.builds(
    Costs,
    blocking_s=st.floats(1e-3, 1e4),
    persist_s=st.just(0.0) | st.floats(1e-3, 1e4),
    restore_s=st.floats(0, 1e4),
)
jobs = st.builds(TrainingJob, nodes=st.integers(1, 131_072), restart_s=st.floats(0, 3600))


def job_with(mtbf_s: float, restart_s: float = 0) -> TrainingJob:
    return TrainingJob(
        nodes=1, failures_per_1000_node_days=1000 * DAY_S / mtbf_s, restart_s=restart_s
    )


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_mtbf_of_papers(gpus: int, hours: float) -> None:
    """arXiv 2410.21680: 6.50 failures per 1000 node-days, 8 GPUs to a node. arXiv 2407.21783: 419
    interruptions in 54 days on 16,384 GPUs, one every 3.1 hours."""
    mtbf_h = TrainingJob(nodes=gpus // 8, failures_per_1000_node_days=6.5).mtbf_s / 3600
    assert float(f"{mtbf_h:.2g}") == hours
    llama = TrainingJob(nodes=2048, failures_per_1000_node_days=419 / (2048 * 54) * 1000)
    assert llama.mtbf_s == pytest.approx(54 * DAY_S / 419)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"nodes": 0}, {"gpus_per_node": 0}, {"restart_s": -1.0}, {"restart_s": math.inf}),
        *({"failures_per_1000_node_days": rate} for rate in (0.0, 1e-305, 1e305, math.nan)),
    ],
)
def test_a_job_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong)).replace("_", "-").removesuffix("-s")):
        TrainingJob(**({"nodes": 1} | wrong))


@pytest.mark.parametrize(
    "wrong", [{"blocking_s": -1.0}, {"restore_s": math.nan}, {"blocking_s": 0.0}]
)
def test_costs_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Costs(**({"blocking_s": 1.0, "restore_s": 1.0} | wrong))


def test_figures_by_hand() -> None:
    """ETTR with t = 60, b = 40, R = 50, P = 0 and 20, M = 100: 0.6 e^-0.5 / (e - 1), and e^-0.2 of
    it. Lost work for rare failures: half an interval, the save and the persist time, as far as it
    trains."""
    sync, job = Costs(blocking_s=40, restore_s=30), job_with(100, restart_s=20)
    expected = 0.6 * math.exp(-0.5) / (math.e - 1)
    assert goodput.ettr(60, sync, job) == pytest.approx(expected)
    behind = Costs(blocking_s=40, restore_s=30, persist_s=20)
    assert goodput.ettr(60, behind, job) == pytest.approx(expected * math.exp(-0.2))
    found = goodput.lost_work_s(90, Costs(blocking_s=10, persist_s=5, restore_s=0), job_with(1e9))
    assert found == pytest.approx(0.9 * (45 + 10 + 5), rel=1e-5)


@given(costs, st.floats(1, 1e5))
def test_a_job_that_never_fails_pays_for_blocking_only(costs: Costs, interval: float) -> None:
    """Infinite MTBF: t / (t + b)."""
    interval = max(interval, costs.persist_s)
    expected = interval / (interval + costs.blocking_s)
    never = job_with(1e18)
    assert goodput.ettr(interval, costs, never) == pytest.approx(expected)


def test_saves_that_cost_nothing_leave_only_recovery() -> None:
    """As the cost goes to zero, the best ETTR goes to e^(-R / M), and no work is lost."""
    job = job_with(1000, restart_s=100)
    costs = Costs(blocking_s=1e-9, restore_s=0)
    interval = goodput.optimal(1e-9, 1000)
    assert goodput.ettr(interval, costs, job) == pytest.approx(math.exp(-0.1), rel=1e-5)
    assert goodput.lost_work_s(interval, costs, job) == pytest.approx(0, abs=1e-2)


@given(costs, jobs, st.floats(1, 1e3))
def test_ettr_is_a_share_and_more_cost_never_helps(
    costs: Costs, job: TrainingJob, factor: float
) -> None:
    """It is between 0 and 1 at any interval. A longer save, restore or persist time lowers it."""
    interval = costs.persist_s * factor + 10
    found = goodput.ettr(interval, costs, job)
    assert 0 <= found <= 1
    assert goodput.lost_work_s(interval, costs, job) >= 0
    dearer = Costs(
        blocking_s=costs.blocking_s + 1,
        persist_s=costs.persist_s,
        restore_s=costs.restore_s + 1,
    )
    assert goodput.ettr(interval, dearer, job) <= found


@given(costs, jobs)
def test_the_interval_under_the_persist_time_has_no_formula(costs: Costs, job: TrainingJob) -> None:
    """The formulas do not describe saves that wait: such intervals are refused."""
    least = costs.persist_s
    if least > 0:
        for formula in (goodput.ettr, goodput.lost_work_s):
            formula(least, costs, job)
            with pytest.raises(ValueError, match="wait for each other"):
                formula(least * 0.99, costs, job)


def test_limits_of_the_best_interval() -> None:
    """No save waits: the persist time is the least, also for saves that do not block. A job that
    never runs (saves and recovery of 11 days, a failure every 101 s) has 0, not NaN, and no
    overflow."""
    job, stuck = TrainingJob(nodes=2048), TrainingJob(nodes=131_072)
    limited = Costs(blocking_s=1, persist_s=3600, restore_s=60)
    assert goodput.best_interval_s(limited, job) == limited.persist_s == 3600
    free = Costs(blocking_s=0, persist_s=20, restore_s=60)
    assert goodput.best_interval_s(free, job) == 20
    slow = Costs(blocking_s=1e6, restore_s=1e6)
    assert goodput.ettr(goodput.best_interval_s(slow, stuck), slow, stuck) == 0


times = st.floats(1e-3, 1e6)


def _daly(save_s: float, mtbf_s: float) -> float:
    """J. T. Daly, FGCS 22(3), 2006, for saves shorter than twice the MTBF."""
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@pytest.mark.parametrize(("mtbf_min", "figure_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_figures_of_dalys_paper(mtbf_min: float, figure_min: float) -> None:
    """Figures 3 to 5, for saves of 5 minutes: his formula has them to the last digit."""
    digits = 1 if figure_min < 10 else 0
    assert round(_daly(5 * 60, mtbf_min * 60) / 60, digits) == figure_min
    optimal_min = goodput.optimal(5 * 60, mtbf_min * 60) / 60
    assert optimal_min == pytest.approx(figure_min, rel=0.03)


@given(save=times, mtbf=times)
def test_the_optimum_is_the_optimum(save: float, mtbf: float) -> None:
    """No interval near it and none on a wide grid has a higher ETTR."""
    job, costs = job_with(mtbf), Costs(blocking_s=save, restore_s=0)
    best = goodput.optimal(save, mtbf)
    assert 0 < best <= mtbf
    found = goodput.ettr(best, costs, job)
    for factor in (*np.geomspace(1e-3, 1e3, 25), 0.999, 1.001):
        assert goodput.ettr(best * float(factor), costs, job) <= found * (1 + 1e-9)


def test_the_checkpoint_of_ten_to_the_twelve_parameters() -> None:
    """14.11 TB take 51.7 s at 273 GB/s, and 14.1 s at 1 TB/s; 13.8 TB are published."""
    docs = Path(__file__).parents[3] / "docs" / "plan.md"
    total = workloads.load("synthetic-1t-dist").total_size_bytes()
    assert total / 13.8e12 == pytest.approx(1.023, abs=0.001)
    for figure in (f"{total / 1e12:.2f} TB", f"{total / 273e9:.1f} s", f"{total / 1e12:.1f} s"):
        assert figure in docs.read_text()
