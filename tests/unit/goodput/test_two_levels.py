"""Memory and storage checkpoints together: formula, simulation, and the best intervals."""

from __future__ import annotations

import numpy as np
import pytest

from iobench.errors import OptionError
from iobench.goodput import goodput, intervals
from iobench.goodput.costs import Costs
from iobench.goodput.job import TrainingJob
from iobench.goodput.two_levels import (
    MemoryCheckpoints,
    TwoLevels,
    simulate_two_levels,
    two_levels,
)

COSTS = Costs(blocking_s=0.5, persist_s=200, restore_s=60)
MEMORY = MemoryCheckpoints(restore_s=3, replicate_s=5, recovers=0.9)


@pytest.mark.parametrize(("nodes", "off"), [(64, 0.001), (2048, 0.001), (16_384, 0.015)])
@pytest.mark.parametrize("recovers", [0.5, 0.9, 0.99])
def test_formula_and_simulation_agree(nodes: int, off: float, recovers: float) -> None:
    """Within 0.1 points, and within 1.5 where a failure comes every 13 minutes."""
    memory = MemoryCheckpoints(restore_s=3, replicate_s=5, recovers=recovers)
    found = two_levels(COSTS, memory, TrainingJob(nodes=nodes), failures=50_000, seed=1)
    assert found.simulated is not None
    assert found.simulated_error is not None
    assert found.simulated_error < 0.002
    assert abs(found.ettr - found.simulated) < off + 4 * found.simulated_error


def test_memory_that_recovers_almost_nothing_is_storage_alone() -> None:
    """As the recovered part falls to 0, ETTR becomes that of the storage checkpoints."""
    job = TrainingJob(nodes=2048)
    interval_s = goodput.best_interval_s(COSTS, job)
    rare = MemoryCheckpoints(restore_s=3, recovers=1e-9, interval_s=interval_s, storage_every=1)
    found = two_levels(COSTS, rare, job)
    assert found.ettr == pytest.approx(goodput.ettr(interval_s, COSTS, job), rel=1e-6)


def test_best_intervals() -> None:
    """Snapshots for the failures that memory undoes, and storage as often as its slot allows."""
    job = TrainingJob(nodes=2048)
    found = two_levels(COSTS, MEMORY, job)
    assert found.interval_s == intervals.optimal(0.5, job.mtbf_s / 0.9)
    # Each storage checkpoint keeps the slot busy for 200.5 s, while snapshots go on.
    period_s = found.interval_s + COSTS.blocking_s
    assert period_s * found.storage_every >= 200.5 > period_s * (found.storage_every - 1)
    assert found.ettr > goodput.ettr(goodput.best_interval_s(COSTS, job), COSTS, job)
    slower = [
        two_levels(COSTS, MemoryCheckpoints(restore_s=3, replicate_s=5, interval_s=at), job)
        for at in (found.interval_s / 4, found.interval_s * 4)
    ]
    assert max(one.ettr for one in slower) < found.ettr


def test_the_blocking_times_of_snapshots_count_for_storage_too() -> None:
    """With 2 s each 8 s of work, storage that takes 18 s keeps up with each second snapshot."""
    costs = Costs(blocking_s=2, persist_s=18, restore_s=1)
    job = TrainingJob(nodes=8)
    memory = MemoryCheckpoints(restore_s=1, interval_s=8)
    assert two_levels(costs, memory, job).storage_every == 2
    each = MemoryCheckpoints(restore_s=1, interval_s=8, storage_every=1)
    with pytest.raises(OptionError, match="needs 2 intervals"):
        two_levels(costs, each, job)


def test_intervals_that_cannot_be() -> None:
    """Snapshots that cost nothing have no best interval; a copy must be safe before the next."""
    free = Costs(blocking_s=0, persist_s=9, restore_s=1)
    with pytest.raises(OptionError, match="no best interval"):
        two_levels(free, MemoryCheckpoints(restore_s=1), TrainingJob(nodes=8))
    with pytest.raises(OptionError, match="at least memory-replicate"):
        MemoryCheckpoints(restore_s=1, replicate_s=5, interval_s=4)


def test_single_failures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 10 s of work a snapshot of 1 s, safe 2 s later; each second one on storage 5 s later.

    Restart 3, restore 4 from storage, 1 from memory. The times between failures, and whether
    memory recovers, are given.
    """
    job = TrainingJob(nodes=1, restart_s=3)
    costs = Costs(blocking_s=1, persist_s=5, restore_s=4)
    plan = TwoLevels(interval_s=10, storage_every=2, ettr=0)
    gaps = [7 + 26.9, 4 + 8, 4 + 17, 7 + 27, 7 + 30]
    undone = [True, True, False, False, False]

    class Given:
        def exponential(self, scale: float, size: int) -> object:
            return np.array(gaps)

        def random(self, size: int) -> object:
            return np.array([0.0 if one else 1.0 for one in undone])

    monkeypatch.setattr("iobench.goodput.two_levels.np.random.default_rng", lambda _: Given())
    memory = MemoryCheckpoints(restore_s=1, replicate_s=2)
    found = simulate_two_levels(plan, costs, memory, job, failures=5, seed=0)
    # Run 1, 26.9 s: snapshots 1 and 2 are safe; 2 would be on storage at 27.
    # Run 2, 8 s from snapshot 2: nothing. Run 3, 17 s: snapshot 3, which storage does not get.
    # So all is lost. Run 4, 27 s from the start: snapshot 2. Run 5, 30 s from it: snapshot 4.
    kept, wall = (0 + 2 + 2) * 10, sum(gaps)
    assert found.simulated == pytest.approx(kept / wall)


@pytest.mark.parametrize(
    "wrong",
    [
        {"restore_s": -1},
        {"restore_s": 1, "recovers": 1.0},
        {"restore_s": 1, "recovers": 0.0},
        {"restore_s": 1, "interval_s": 0.0},
        {"restore_s": 1, "storage_every": 0},
    ],
)
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        MemoryCheckpoints(**wrong)  # type: ignore[arg-type]  # the values are what is tested


def test_what_cannot_be_planned() -> None:
    """Storage that cannot keep up, a synchronous save, and failures in groups."""
    job = TrainingJob(nodes=2048)
    often = MemoryCheckpoints(restore_s=3, interval_s=30, storage_every=2)
    with pytest.raises(OptionError, match="needs 7 intervals of 30 s"):
        two_levels(COSTS, often, job)
    with pytest.raises(OptionError, match="blocking time of a snapshot"):
        two_levels(Costs(blocking_s=30, restore_s=60), MEMORY, job)
    with pytest.raises(OptionError, match="shape 1"):
        two_levels(COSTS, MEMORY, TrainingJob(nodes=8, failure_shape=0.7))
