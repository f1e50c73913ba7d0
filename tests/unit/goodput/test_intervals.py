"""The best interval against published figures and formulas, brute force and limits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.goodput import goodput
from iobench.goodput.goodput import DAY_S, Costs, TrainingJob

MINUTE = 60.0
times = st.floats(1e-3, 1e6)


def _daly(save_s: float, mtbf_s: float) -> float:
    """J. T. Daly, FGCS 22(3), 2006, for saves shorter than twice the MTBF."""
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@pytest.mark.parametrize(("mtbf_min", "figure_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_figures_of_dalys_paper(mtbf_min: float, figure_min: float) -> None:
    """Figures 3 to 5, for saves of 5 minutes: his formula has them to the last digit."""
    digits = 1 if figure_min < 10 else 0
    assert round(_daly(5 * MINUTE, mtbf_min * MINUTE) / MINUTE, digits) == figure_min
    optimal_min = goodput.optimal(5 * MINUTE, mtbf_min * MINUTE) / MINUTE
    assert optimal_min == pytest.approx(figure_min, rel=0.03)


def test_it_is_youngs_interval_where_saves_are_cheap() -> None:
    """`sqrt(2 d M)`, for a save far below the MTBF."""
    assert goodput.optimal(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-4)
    assert goodput.optimal(0, 100) == 0


@given(save=times, mtbf=times)
def test_the_optimum_is_the_optimum(save: float, mtbf: float) -> None:
    """No interval near it and none on a wide grid has a higher ETTR."""
    job = TrainingJob(nodes=1, failures_per_1000_node_days=1000 * DAY_S / mtbf, restart_s=0)
    costs = Costs(blocking_s=save, restore_s=0)
    best = goodput.optimal(save, mtbf)
    assert 0 < best <= mtbf
    found = goodput.ettr(best, costs, job)
    for factor in (*np.geomspace(1e-3, 1e3, 25), 0.999, 1.001):
        assert goodput.ettr(best * float(factor), costs, job) <= found * (1 + 1e-9)


@given(save=times, mtbf=times)
def test_daly_comes_close_to_the_optimum(save: float, mtbf: float) -> None:
    """In its stated range, Daly's interval is within 6% of the optimum. The MTBF is an upper bound
    of both."""
    if save < mtbf / 2:
        optimal = goodput.optimal(save, mtbf)
        assert _daly(save, mtbf) == pytest.approx(optimal, rel=0.06)


def test_slots_by_hand() -> None:
    """PCcheck: T_w / N. A slot is also in use while the snapshot is made."""
    assert goodput.shortest(Costs(blocking_s=0, persist_s=60, restore_s=0, slots=4)) == 15
    assert goodput.shortest(Costs(blocking_s=2, persist_s=60, restore_s=0)) == 60
    assert goodput.shortest(Costs(blocking_s=2, persist_s=60, restore_s=0, slots=2)) == 29
    assert goodput.shortest(Costs(blocking_s=30, restore_s=0)) == 0
    assert goodput.shortest(Costs(blocking_s=9, persist_s=1, restore_s=0, slots=4)) == 0
