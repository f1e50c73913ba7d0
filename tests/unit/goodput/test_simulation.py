"""The simulation compared with the formulas, with single failures by hand, and with itself."""

import pytest
from support import simulated_failures as simulation
from support.simulated_failures import Simulated, simulate

from iobench.goodput import goodput
from iobench.goodput.goodput import Costs, TrainingJob

SYNC = Costs(blocking_s=30, restore_s=60)
ASYNC = Costs(blocking_s=2, persist_s=20, restore_s=60)
LONG = Costs(blocking_s=2, persist_s=50, restore_s=60)


@pytest.mark.parametrize("nodes", [16, 2048, 16_384, 65_536])
@pytest.mark.parametrize("costs", [SYNC, ASYNC, LONG])
@pytest.mark.parametrize("stretch", [1, 3])
def test_it_agrees_with_the_formulas(nodes: int, costs: Costs, stretch: float) -> None:
    """Within four standard errors, from an MTBF of 9 days to one shorter than the recovery."""
    job = TrainingJob(nodes=nodes)
    best = max(goodput.optimal(costs.blocking_s, job.mtbf_s), costs.persist_s)
    interval = best * stretch
    found = simulate(interval, costs, job, failures=200_000, seed=nodes)
    exact = goodput.ettr(interval, costs, job)
    assert abs(found.ettr - exact) < 4 * found.ettr_error
    assert found.ettr_error < 0.02 * exact
    assert found.lost_work_s is not None
    assert found.lost_work_error is not None
    lost = goodput.lost_work_s(interval, costs, job)
    assert abs(found.lost_work_s - lost) < 4 * found.lost_work_error


def _played(monkeypatch: pytest.MonkeyPatch, gaps: list[float], costs: Costs) -> Simulated:
    """A simulation whose failures come exactly `gaps` apart; intervals of 100, restart 10."""

    class Given:
        def exponential(self, scale: float, size: int) -> object:
            return simulation.np.array(gaps)

    monkeypatch.setattr(simulation.np.random, "default_rng", lambda _: Given())
    return simulate(100, costs, TrainingJob(nodes=1, restart_s=10), failures=len(gaps), seed=0)


def test_single_failures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery takes 10 + 5. Saves block for 20 and are durable 30 later: at 150, 270, 390, ... A
    failure at 14 after the last one hits the restart. At 15 + 149 the first save is in flight, and
    129 of work are lost. At 15 + 150 it has just become durable: of 130 done, 100 are kept. At 15 +
    275 so has the second save, and 220 + 35 of the third interval were done."""
    costs = Costs(blocking_s=20, persist_s=30, restore_s=5)
    found = _played(monkeypatch, [14, 15 + 149, 15 + 150, 15 + 275], costs)
    kept, wall = 0 + 0 + 100 + 200, 14 + 164 + 165 + 290
    assert found.ettr == pytest.approx(kept / wall)
    assert found.lost_work_s == pytest.approx((129 + 30 + 35) / 3)
    assert found.saves == 3
