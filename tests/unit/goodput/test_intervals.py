"""Intervals compared with the papers' figures, values computed by hand, limits and brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.goodput import goodput, intervals
from iobench.goodput.costs import Costs
from iobench.goodput.job import DAY_S, TrainingJob

MINUTE, HOUR = 60.0, 3600.0
times = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(("mtbf_min", "figure_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_gives_the_figures_of_his_paper(mtbf_min: float, figure_min: float) -> None:
    """Figures 3 to 5 of Daly (2006), for saves of 5 minutes."""
    interval_min = intervals.daly(5 * MINUTE, mtbf_min * MINUTE) / MINUTE
    digits = 1 if figure_min < 10 else 0
    assert round(interval_min, digits) == figure_min


def test_young_by_hand() -> None:
    assert intervals.young(5 * MINUTE, 24 * HOUR) == pytest.approx(120 * MINUTE)
    assert intervals.young(8, 100) == 40


def test_daly_gives_up_at_two_mtbf() -> None:
    assert intervals.daly(200, 100) == intervals.daly(1e9, 100) == 100
    assert intervals.daly(199.999, 100) == pytest.approx(100, abs=60)


def test_availability_by_hand_and_as_the_best_of_its_own_formula() -> None:
    """The period, which includes the save, is `d + sqrt(2 (M + R) d + d^2)`. It maximises A."""
    save, mtbf, recovery = 30.0, 6000.0, 360.0
    interval = intervals.availability_optimal(save, mtbf, recovery)
    assert interval == pytest.approx(math.sqrt(2 * 6360 * 30 + 900))

    def availability(period: float) -> float:
        return (1 - save / period) * mtbf / (mtbf + recovery + period / 2)

    best = interval + save
    assert availability(best) > max(availability(best * 0.99), availability(best * 1.01))


def test_all_formulas_meet_where_saves_are_cheap() -> None:
    """For a save far below the MTBF, all formulas give Young's interval."""
    save, mtbf = 1.0, 1e9
    young = intervals.young(save, mtbf)
    for interval in (
        intervals.daly(save, mtbf),
        intervals.optimal(save, mtbf),
        intervals.availability_optimal(save, mtbf, 1.0),
    ):
        assert interval == pytest.approx(young, rel=1e-4)


def test_no_cost_means_saving_all_the_time() -> None:
    assert intervals.young(0, 100) == intervals.daly(0, 100) == intervals.optimal(0, 100) == 0


@given(save=times, mtbf=times)
def test_the_optimum_is_the_optimum(save: float, mtbf: float) -> None:
    """No interval near it and none on a wide grid has a higher ETTR."""
    job = TrainingJob(nodes=1, failures_per_1000_node_days=1000 * DAY_S / mtbf, restart_s=0)
    costs = Costs(blocking_s=save, restore_s=0)
    best = intervals.optimal(save, mtbf)
    assert 0 < best <= mtbf
    found = goodput.ettr(best, costs, job)
    for factor in (*np.geomspace(1e-3, 1e3, 25), 0.999, 1.001):
        assert goodput.ettr(best * float(factor), costs, job) <= found * (1 + 1e-9)


@given(save=times, mtbf=times)
def test_daly_comes_close_to_the_optimum(save: float, mtbf: float) -> None:
    """In its stated range, Daly's interval is within 6% of the optimum. The MTBF is an upper bound
    of both."""
    if save < mtbf / 2:
        optimal = intervals.optimal(save, mtbf)
        assert intervals.daly(save, mtbf) == pytest.approx(optimal, rel=0.06)


def test_checkfreq_by_hand() -> None:
    """The persist time in whole steps, then two steps at a time until the budget holds."""
    costs = Costs(blocking_s=1, persist_s=7, restore_s=0)
    assert intervals.by_budget(costs, 0.5, step_s=2) == 4 * 2  # ceil(7 / 2), overhead 1 / 8
    assert intervals.by_budget(costs, 0.1, step_s=2) == 6 * 2  # 1 / 8 is too much, 1 / 12 is not
    assert intervals.by_budget(costs, 0.035, step_s=2) == 16 * 2  # 1 / 28 is 3.57%, 1 / 32 is not
    assert intervals.by_budget(Costs(blocking_s=0, persist_s=1, restore_s=0), 0.035, step_s=9) == 9
    assert intervals.by_budget(costs, 0.035) == pytest.approx(1 / 0.035)
    assert intervals.by_budget(costs, 0.5) == 7
    with pytest.raises(ValueError, match="above zero"):
        intervals.by_budget(costs, 0)


def test_slots_by_hand() -> None:
    """PCcheck: T_w / N. A slot is also in use while the snapshot is made."""
    assert intervals.shortest(Costs(blocking_s=0, persist_s=60, restore_s=0, slots=4)) == 15
    assert intervals.shortest(Costs(blocking_s=2, persist_s=60, restore_s=0)) == 60
    assert intervals.shortest(Costs(blocking_s=2, persist_s=60, restore_s=0, slots=2)) == 29
    assert intervals.shortest(Costs(blocking_s=30, restore_s=0)) == 0
    assert intervals.shortest(Costs(blocking_s=9, persist_s=1, restore_s=0, slots=4)) == 0
