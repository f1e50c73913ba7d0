"""ETTR, lost work and failure rates: values computed by hand, published figures and limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import OptionError
from iobench.goodput import goodput
from iobench.goodput.goodput import DAY_S, Costs, TrainingJob

costs = st.builds(
    Costs,
    blocking_s=st.floats(1e-3, 1e4),
    persist_s=st.floats(0, 1e4),
    restore_s=st.floats(0, 1e4),
    slots=st.integers(1, 4),
)
jobs = st.builds(TrainingJob, nodes=st.integers(1, 131_072), restart_s=st.floats(0, 3600))


def job_with(mtbf_s: float, restart_s: float = 0) -> TrainingJob:
    return TrainingJob(
        nodes=1, failures_per_1000_node_days=1000 * DAY_S / mtbf_s, restart_s=restart_s
    )


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_mtbf_of_the_reliability_paper(gpus: int, hours: float) -> None:
    """arXiv 2410.21680: 6.50 failures per 1000 node-days, 8 GPUs to a node."""
    mtbf_h = TrainingJob(nodes=gpus // 8, failures_per_1000_node_days=6.5).mtbf_s / 3600
    assert float(f"{mtbf_h:.2g}") == hours


def test_mtbf_of_llama_3() -> None:
    """arXiv 2407.21783: 419 interruptions in 54 days on 16,384 GPUs, one every 3.1 hours."""
    rate = 419 / (2048 * 54) * 1000
    assert TrainingJob(nodes=2048, failures_per_1000_node_days=rate).mtbf_s == pytest.approx(
        54 * DAY_S / 419
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"gpus_per_node": 0},
        {"failures_per_1000_node_days": 0.0},
        {"failures_per_1000_node_days": math.nan},
        {"restart_s": -1.0},
        {"restart_s": math.inf},
    ],
)
def test_a_job_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong)).replace("_", "-").removesuffix("-s")):
        TrainingJob(**({"nodes": 1} | wrong))


@pytest.mark.parametrize(
    "wrong", [{"blocking_s": -1.0}, {"restore_s": math.nan}, {"blocking_s": 0.0}, {"slots": 0}]
)
def test_costs_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Costs(**({"blocking_s": 1.0, "restore_s": 1.0} | wrong))


def test_ettr_by_hand() -> None:
    """t = 60, b = 40, R = 50, P = 0 and 20, M = 100: 0.6 e^-0.5 / (e - 1), and e^-0.2 of it."""
    sync, job = Costs(blocking_s=40, restore_s=30), job_with(100, restart_s=20)
    expected = 0.6 * math.exp(-0.5) / (math.e - 1)
    assert goodput.ettr(60, sync, job) == pytest.approx(expected)
    behind = Costs(blocking_s=40, restore_s=30, persist_s=20)
    assert goodput.ettr(60, behind, job) == pytest.approx(expected * math.exp(-0.2))


def test_lost_work_by_hand() -> None:
    """For rare failures: half an interval, the save and the persist time, as far as it trains."""
    found = goodput.lost_work_s(90, Costs(blocking_s=10, persist_s=5, restore_s=0), job_with(1e9))
    assert found == pytest.approx(0.9 * (45 + 10 + 5), rel=1e-5)


@given(costs, st.floats(1, 1e5))
def test_a_job_that_never_fails_pays_for_blocking_only(costs: Costs, interval: float) -> None:
    """Infinite MTBF: t / (t + b)."""
    interval = max(interval, goodput.shortest(costs))
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
    interval = goodput.shortest(costs) * factor + 10
    found = goodput.ettr(interval, costs, job)
    assert 0 <= found <= 1
    assert goodput.lost_work_s(interval, costs, job) >= 0
    dearer = Costs(
        blocking_s=costs.blocking_s + 1,
        persist_s=costs.persist_s,
        restore_s=costs.restore_s + 1,
        slots=costs.slots,
    )
    assert goodput.ettr(interval, dearer, job) <= found


@given(costs, jobs)
def test_the_interval_under_the_slot_limit_has_no_formula(costs: Costs, job: TrainingJob) -> None:
    """The formulas do not describe saves that wait for slots: such intervals are refused."""
    least = goodput.shortest(costs)
    if least > 0:
        for formula in (goodput.ettr, goodput.lost_work_s):
            formula(least, costs, job)
            with pytest.raises(ValueError, match="wait for slots"):
                formula(least * 0.99, costs, job)


def test_no_save_waits_at_the_best_interval() -> None:
    """The slot limit holds, also for saves that do not block."""
    job = TrainingJob(nodes=2048)
    limited = Costs(blocking_s=1, persist_s=3600, restore_s=60)
    assert goodput.best_interval_s(limited, job) == goodput.shortest(limited) == 3600
    free = Costs(blocking_s=0, persist_s=20, restore_s=60)
    assert goodput.best_interval_s(free, job) == 20


def test_a_job_that_never_runs_has_figures() -> None:
    """Saves and recovery of 11 days where a failure comes every 101 s: 0, not NaN, no overflow."""
    stuck = TrainingJob(nodes=131_072)
    slow = Costs(blocking_s=1e6, restore_s=1e6)
    assert goodput.ettr(goodput.best_interval_s(slow, stuck), slow, stuck) == 0
