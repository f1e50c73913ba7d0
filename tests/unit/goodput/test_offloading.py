"""The plan of optimizer state on SSDs: exact figures, and the inequality at its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iobench.goodput.offloading import Offloading

# 26 B x 6e9 = 156 GB; at 7.8 GB/s they take 20 s.
_PLAN = Offloading(
    parameters=6_000_000_000,
    nodes=1,
    rate_bytes_per_s=7.8e9,
    step_s=30.0,
    backward_s=20.0,
    rated_bytes=14_016 * 10**12,
)


def test_at_the_limit_backward_hides_the_stream() -> None:
    """26 B for each parameter, over the rate, is exactly the time of backward."""
    assert _PLAN.stream_s == pytest.approx(20.0)
    assert _PLAN.pays
    assert _PLAN.hidden_step_s == pytest.approx(30.0)
    assert _PLAN.serial_step_s == pytest.approx(50.0)
    assert _PLAN.needed_rate_bytes_per_s == pytest.approx(7.8e9)


def test_what_backward_does_not_hide_is_added() -> None:
    """With half the rate the stream takes 40 s: 20 s come after backward."""
    slow = replace(_PLAN, rate_bytes_per_s=3.9e9)
    assert not slow.pays
    assert slow.hidden_step_s == pytest.approx(50.0)
    assert slow.serial_step_s == pytest.approx(70.0)
    assert slow.needed_rate_bytes_per_s == pytest.approx(7.8e9)


def test_bytes_and_endurance() -> None:
    """84 GB in a step, 2,880 steps a day, and 14 PB of rated writes."""
    assert _PLAN.memory_saved_bytes == 72 * 10**9
    assert _PLAN.written_bytes == _PLAN.state_bytes == 84 * 10**9
    assert _PLAN.restore_bytes == 12 * 10**9
    assert _PLAN.written_per_day_bytes == pytest.approx(241.92e12)
    assert _PLAN.life_days == pytest.approx(14_016 / 241.92)
    assert replace(_PLAN, rated_bytes=None).life_days is None


def test_nodes_share_the_state() -> None:
    """Each of 7 nodes has a seventh, rounded up."""
    shared = replace(_PLAN, nodes=7)
    assert shared.elements == 857_142_858
    assert shared.pays
