"""Placement: the choice of a tier by measured rates, replayed on traces against an oracle."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from support.rate_traces import TRACES, replay

from iobench.errors import OptionError
from iobench.remote.placement import (
    Observation,
    Placement,
    PlacementGoal,
    TierHistory,
    choose,
    estimate,
)
from iobench.units import GIB


@pytest.mark.parametrize("name", TRACES)
def test_near_the_oracle(name: str) -> None:
    """Within 5 % of the oracle's total time to durable; at most one needless switch per change.

    The beginning counts as a change: nothing is known then.
    """
    trace = TRACES[name]
    found = replay(trace, "durable", noise=0.1)
    assert found.total_s <= 1.05 * found.oracle_s
    needless = len(found.switches) - trace.changes
    assert needless <= max(1, trace.changes), found.reasons


def test_the_replay_finds_a_bad_placement() -> None:
    """The check itself can fail: a goal that never leaves local storage is far from the oracle."""
    found = replay(TRACES["remote rises"], "bandwidth", noise=0.03)
    assert found.total_s > 1.3 * found.oracle_s


def _seen(*seconds: float, begin: int = 0) -> list[Observation]:
    return [
        Observation(number=number, size_bytes=GIB, elapsed_s=abs(one), ok=one > 0)
        for number, one in enumerate(seconds, begin)
    ]


def _history(local: list[Observation], remote: list[Observation]) -> TierHistory:
    seen = {"local": deque(local), "remote": deque(remote)}
    return TierHistory(seen=seen, current="local")


def _tier(history: TierHistory, goal: PlacementGoal = "durable") -> str:
    return choose(history, goal, size_bytes=GIB).tier


def test_begins_in_the_first_tier() -> None:
    """Without any measurement. The copy of the save measures the other tier."""
    found = choose(TierHistory(), "durable", size_bytes=GIB)
    assert (found.tier, found.probe, found.limit_s) == ("local", False, None)


def test_one_slow_transfer_is_not_enough_and_three_are() -> None:
    """A switch needs two transfers of each tier, and all of the last three after a change."""
    fast, slow = _seen(1.0, 1.0, 1.0), _seen(0.5, 0.5, 3.0)
    assert _tier(_history(slow, fast)) == "local"
    assert _tier(_history(_seen(0.5, 3.0, 3.1, 3.0), fast)) == "remote"
    assert _tier(_history(_seen(3.0, 3.1), fast[:1])) == "local"


def test_a_failed_tier_is_left_at_once() -> None:
    """Without a second transfer, until newer ones show that it is faster again."""
    failed = _seen(0.5, 0.5, -1.0)
    assert _tier(_history(failed, _seen(1.0, 1.0))) == "remote"
    assert _tier(_history(failed + _seen(0.5, 0.5, begin=3), _seen(1.0, 1.0))) == "local"


def test_the_local_tier_is_probed() -> None:
    """Until two transfers are known, and after four saves to the remote tier; not after a save to
    itself."""

    def probe(local: list[Observation], remote: list[Observation], current: str = "remote") -> bool:
        history = _history(local, remote)
        history.current = current
        return choose(history, "durable", size_bytes=GIB).probe

    slow = _seen(3.0, 3.0)
    assert probe(_seen(3.0), _seen(1.0, 1.0))
    assert not probe(slow, _seen(1.0, 1.0, 1.0, begin=2))
    assert probe(slow, _seen(1.0, 1.0, 1.0, 1.0, begin=2))
    assert not probe(slow, _seen(3.0, 3.0, 3.0, 3.0, begin=2), current="local")


@pytest.mark.parametrize("goal", ["durable", "bandwidth", "capacity"])
def test_a_closed_tier_is_not_chosen(goal: Any) -> None:
    """By no goal, and it is not probed."""
    for closed, other in (("local", "remote"), ("remote", "local")):
        found = choose(TierHistory(), goal, size_bytes=GIB, closed={closed: "it is"})
        assert (found.tier, found.probe) == (other, False)


def test_no_tier_is_usable() -> None:
    """The first one is tried again, and the reason names both problems."""
    history = _history(_seen(-1.0), _seen(-1.0))
    found = choose(history, "durable", size_bytes=GIB)
    assert found.tier == "local"
    assert "local failed" in found.reason
    assert "remote failed" in found.reason


@pytest.mark.parametrize(("goal", "expected"), [("bandwidth", "local"), ("capacity", "remote")])
def test_other_goals_do_not_race(goal: Any, expected: str) -> None:
    """They prefer a tier however slow it is, until it fails."""
    slow = {"local": 1.0, "remote": 1.0, expected: 9.0}
    seen = {name: _seen(one, one, one) for name, one in slow.items()}
    assert _tier(_history(**seen), goal) == expected
    seen[expected] += _seen(-1.0)
    assert _tier(_history(**seen), goal) != expected


def test_the_estimate_follows_a_change() -> None:
    """Two transfers after a step are enough; a single one that differs is ignored."""
    found = estimate(_seen(1.0, 1.02, 0.99, 1.01, 3.0, 3.05))
    assert found is not None
    assert (found.count, found.seconds(GIB)) == (3, pytest.approx(3.0))
    found = estimate(_seen(1.02, 0.99, 1.0, 1.02, 3.0, 1.01))
    assert found is not None
    assert found.seconds(GIB) == pytest.approx(1.02)
    assert found.low < 1.0 / GIB < found.high
    assert estimate(_seen(1.0, -1.0)) is None


def test_options() -> None:
    """Another goal is refused."""
    with pytest.raises(OptionError, match="goal='fast': one of durable, bandwidth, capacity"):
        Placement(goal="fast")  # type: ignore[arg-type]  # wrong on purpose
