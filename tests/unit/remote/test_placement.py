"""Placement: the choice of a tier by measured rates, replayed on traces against an oracle."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from support.rate_traces import TRACES, replay

from iobench.errors import OptionError
from iobench.remote.placement import Observation, Placement, TierHistory, choose, estimate
from iobench.units import GIB


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("name", TRACES)
def test_near_the_oracle(name: str, noise: float) -> None:
    """Within 5 % of the oracle's total time to durable; at most one needless switch per change.

    The beginning counts as a change: nothing is known then.
    """
    trace = TRACES[name]
    found = replay(trace, Placement(), noise=noise)
    assert found.total_s <= 1.05 * found.oracle_s
    needless = len(found.switches) - trace.changes
    assert needless <= max(1, trace.changes), found.reasons


def test_the_replay_finds_a_bad_placement() -> None:
    """The check itself can fail: a goal that never leaves local storage is far from the oracle."""
    found = replay(TRACES["remote rises"], Placement(goal="bandwidth"), noise=0.03)
    assert found.total_s > 1.3 * found.oracle_s


def _seen(*seconds: float, begin_s: float = 0.0) -> list[Observation]:
    return [
        Observation(at_s=begin_s + 100.0 * number, size_bytes=GIB, elapsed_s=abs(one), ok=one > 0)
        for number, one in enumerate(seconds)
    ]


def _history(local: list[Observation], remote: list[Observation]) -> TierHistory:
    seen = {"local": deque(local), "remote": deque(remote)}
    return TierHistory(seen=seen, current="local", since_s=0.0)


def _tier(history: TierHistory, placement: Placement | None = None, now_s: float = 1e4) -> str:
    found = choose(history, placement or Placement(), size_bytes=GIB, now_s=now_s)
    return found.tier


def test_begins_in_the_first_tier() -> None:
    """Without any measurement; the other tier is to be probed."""
    found = choose(TierHistory(), Placement(), size_bytes=GIB, now_s=0.0)
    assert (found.tier, found.probe, found.figures) == ("local", "remote", {})


def test_one_slow_transfer_is_not_enough_and_two_are() -> None:
    """A switch needs two transfers of each tier."""
    fast, slow = _seen(1.0, 1.0, 1.0), _seen(0.5, 0.5, 3.0)
    assert _tier(_history(slow, fast)) == "local"
    assert _tier(_history(_seen(0.5, 0.5, 3.0, 3.1), fast)) == "remote"
    assert _tier(_history(_seen(3.0, 3.1), fast[:1])) == "local"


def test_dwell() -> None:
    """After a switch, another one waits; a failed tier is left all the same."""
    fast, slow = _seen(1.0, 1.0), _seen(3.0, 3.0)
    history = replace(_history(slow, fast), since_s=9_990.0)
    assert _tier(history) == "local"
    assert _tier(history, now_s=10_051.0) == "remote"
    dead = replace(_history(_seen(3.0, -1.0), fast), since_s=9_990.0)
    assert _tier(dead) == "remote"


def test_a_failed_tier_is_probed_with_growing_pauses() -> None:
    """30 s after the first failure, 60 s after the second, at most 10 minutes."""
    for count, pause_s in ((1, 30.0), (2, 60.0), (3, 120.0), (12, 600.0)):
        dead = _seen(1.0, *[-1.0] * count)
        history = _history(_seen(1.0, 1.0, begin_s=5_000.0), dead)
        last_s = dead[-1].at_s
        for after_s, expected in ((pause_s - 1, None), (pause_s, "remote")):
            found = choose(history, Placement(), size_bytes=GIB, now_s=last_s + after_s)
            assert (found.tier, found.probe) == ("local", expected), (count, after_s)


@pytest.mark.parametrize("goal", ["durable", "bandwidth", "capacity"])
def test_a_closed_tier_is_not_chosen(goal: Any) -> None:
    """By no goal, and it is not probed."""
    for closed, other in (("local", "remote"), ("remote", "local")):
        found = choose(
            TierHistory(), Placement(goal=goal), size_bytes=GIB, now_s=0.0, closed={closed: "it is"}
        )
        assert (found.tier, found.probe) == (other, None)


def test_no_tier_is_usable() -> None:
    """The first one is tried again, and the reason names both problems."""
    history = _history(_seen(-1.0), _seen(-1.0))
    found = choose(history, Placement(), size_bytes=GIB, now_s=0.0)
    assert found.tier == "local"
    assert "local failed" in found.reason
    assert "remote failed" in found.reason


@pytest.mark.parametrize(("goal", "expected"), [("bandwidth", "local"), ("capacity", "remote")])
def test_other_goals_do_not_race(goal: Any, expected: str) -> None:
    """They prefer a tier however slow it is, until it fails."""
    slow = {"local": 1.0, "remote": 1.0, expected: 9.0}
    seen = {name: _seen(one, one, one) for name, one in slow.items()}
    assert _tier(_history(**seen), Placement(goal=goal)) == expected
    seen[expected] += _seen(-1.0, begin_s=5_000.0)
    assert _tier(_history(**seen), Placement(goal=goal)) != expected


def test_the_estimate_forgets_what_was_before_a_change() -> None:
    """Two transfers after a step are enough; a single one that differs is ignored."""
    found = estimate(_seen(1.0, 1.02, 0.99, 1.01, 3.0, 3.05))
    assert found is not None
    assert found.count == 2
    assert found.seconds(GIB) == pytest.approx(math.sqrt(3.0 * 3.05))
    found = estimate(_seen(1.02, 0.99, 1.0, 1.02, 3.0, 1.01, 0.99))
    assert found is not None
    assert found.count == 6
    assert found.low < 1.0 / GIB < found.high
    assert estimate(_seen(1.0, -1.0)) is None


@pytest.mark.parametrize(
    "wrong",
    [{"goal": "fast"}, {"dwell": -1.0}],
    ids=str,
)
def test_options(wrong: dict[str, object]) -> None:
    """Values out of range are refused."""
    with pytest.raises(OptionError):
        Placement(**wrong)  # type: ignore[arg-type]  # wrong on purpose
