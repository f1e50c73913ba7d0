"""The recorded trials of a setting, and the cost that they predict for the next one."""

from __future__ import annotations

import pytest

from iobench.tune.objective import Measurement, Phase, Step
from iobench.tune.race import History


def step(phase: Phase = "race", size_bytes: int = 100) -> Step:
    return Step(phase=phase, round=1, size_bytes=size_bytes)


def measured(
    took_s: float, *, stall_s: float | None = None, error: str | None = None
) -> Measurement:
    return Measurement(took_s=took_s, spent_s=took_s, written_bytes=0, stall_s=stall_s, error=error)


def test_trials_of_a_phase_or_of_all() -> None:
    """In their order. A setting that was never tried has none."""
    history = History()
    one, two, three = measured(1), measured(2), measured(3)
    history.add("a", step("probe"), one)
    history.add("a", step("confirm"), three)
    history.add("a", step("race"), two)
    history.add("b", step("confirm"), two)
    assert history.of("a") == [one, three, two]
    assert history.of("a", "confirm") == [three]
    assert history.of("a", "refine") == history.of("c") == []


def test_those_probed_by_their_first_trial() -> None:
    """The best first, without those that failed in it. Later trials do not count."""
    history = History()
    history.add("slow", step("probe"), measured(3))
    history.add("broken", step("probe"), measured(1, error="OSError: no"))
    history.add("broken", step(), measured(1))
    history.add("fast", step("probe"), measured(2))
    history.add("fast", step(), measured(9, error="OSError: later"))
    names = ["broken", "new", "slow", "fast"]
    assert history.by_probe(names, lambda one: one.took_s) == ["fast", "slow"]
    assert history.by_probe(["slow"], lambda one: one.took_s) == ["slow"]


@pytest.mark.parametrize(
    ("took_s", "stall_s", "size_bytes", "expected_s"),
    [
        (3.0, 0.2, 100, 3.0),
        (3.0, 0.2, 200, 4.0),  # five saves stall; the other two seconds do not grow
        (3.0, 0.2, 50, 2.5),
        (3.0, None, 400, 3.0),
        (3.0, 0.9, 200, 6.0),  # no more than all of it
    ],
)
def test_the_last_trial_predicts_the_next(
    took_s: float, stall_s: float | None, size_bytes: int, expected_s: float
) -> None:
    """The part that moves bytes grows with their number; the waiting part does not."""
    history = History()
    history.add("a", step(size_bytes=1), measured(50, stall_s=10))
    history.add("a", step(size_bytes=100), measured(took_s, stall_s=stall_s))
    assert history.expected_s("a", size_bytes) == expected_s
