"""The cost to minimise, the limits, and how a cost is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated_storage import SimulatedStorage

from iobench.errors import UsageError
from iobench.tune.objective import Measurement, Objective, Step
from iobench.tune.space import Candidate
from iobench.units import GIB, MIB


def measured(save_s: float, restore_s: float, cpu_s: float = 0.5) -> Measurement:
    """1 GiB, saved and restored in so many seconds."""
    step = Step(phase="race", round=1, size_bytes=GIB)
    made = SimulatedStorage(seed=1, noise=lambda _: 0.0)(Candidate.of("odirect", {}, "drawn"), step)
    assert made.save is not None
    save = replace(made.save, elapsed_s=save_s, cpu_s=cpu_s)
    return replace(made, save=save, restore=replace(save, operation="restore", elapsed_s=restore_s))


def test_save_and_restore_are_seconds_per_byte() -> None:
    one = measured(2.0, 8.0)
    assert Objective(goal="save").loss(one) == pytest.approx(2.0 / GIB)
    assert Objective(goal="restore").loss(one) == pytest.approx(8.0 / GIB)


def test_balanced_is_the_geometric_mean() -> None:
    """A save that is twice as fast counts like a restore that is twice as fast."""
    goal = Objective(goal="balanced")
    assert goal.loss(measured(2.0, 8.0)) == pytest.approx(4.0 / GIB)
    assert goal.loss(measured(1.0, 8.0)) == pytest.approx(goal.loss(measured(2.0, 4.0)))


def test_stall_is_the_stall() -> None:
    one = replace(measured(2.0, 8.0), stall_s=0.25)
    goal = Objective(goal="stall")
    assert goal.loss(one) == 0.25
    assert goal.writes(verify=False) == 5
    assert goal.writes(verify=True) == 6
    assert goal.show(0.25, GIB) == "250 ms per 1.00 GiB"


def test_what_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="must be one of save, restore"):
        Objective(goal="speed")


def test_memory_counts_by_its_peak() -> None:
    """One measurement over the limit is enough. Unknown memory is not over the limit."""
    goal = Objective(max_memory_bytes=64 * MIB)
    small = replace(measured(1.0, 1.0), memory_bytes=MIB)
    unknown = replace(small, memory_bytes=None)
    assert goal.over([small, unknown]) == ""
    assert "65.00 MiB of memory" in goal.over([small, replace(small, memory_bytes=65 * MIB)])


def test_cpu_counts_by_the_median_of_three() -> None:
    """One or two samples of CPU time decide nothing; of three the median counts."""
    goal = Objective(max_cpu_s_per_gib=1.0)
    low, high = measured(1.0, 1.0, cpu_s=0.5), measured(1.0, 1.0, cpu_s=2.0)
    assert goal.over([high, high]) == ""
    assert goal.over([low, high, low]) == ""
    assert goal.over([high, low, high]) == "2.00 CPU s/GiB, --max-cpu is 1"


@pytest.mark.parametrize(
    ("took_s", "stall_s", "times", "expected_s"),
    [
        (3.0, 0.2, 1, 3.0),
        (3.0, 0.2, 2, 4.0),  # five saves stall; the other two seconds do not grow
        (3.0, 0.2, 0.5, 2.5),
        (3.0, None, 4, 3.0),
        (3.0, 0.9, 2, 6.0),  # no more than all of it
    ],
)
def test_a_trial_predicts_a_larger_one(
    took_s: float, stall_s: float | None, times: float, expected_s: float
) -> None:
    """The part that moves bytes grows with their number; the waiting part does not."""
    one = Measurement(took_s=took_s, spent_s=took_s, written_bytes=0, stall_s=stall_s)
    assert one.expected_s(times) == expected_s
