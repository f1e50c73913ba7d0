"""simulate: a remote tier whose rate changes, and saves whose tier is chosen by measured rates."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
from support.tier_plans import PLAN

from iobench.tiers.pace import pause_after
from iobench.tiers.placement import Placement
from iobench.tiers.plan import Prediction, RateChange, TiersPlan
from iobench.tiers.simulation import simulate
from iobench.units import MIB

_PLACED = replace(PLAN, saves=60, remote_rate=50 * MIB, placement=Placement(dwell=20))


def _changes(*changes: tuple[float, int]) -> tuple[RateChange, ...]:
    return tuple(RateChange(at_s=at_s, rate_bytes_per_s=rate * MIB) for at_s, rate in changes)


def _tiers(found: Prediction) -> list[tuple[str, int]]:
    """The tiers in order, with how many saves each."""
    return [(tier, len(list(some))) for tier, some in groupby(one.tier for one in found.saves)]


def test_a_rate_that_changes() -> None:
    """The rest of a copy goes on at the new rate."""
    found = simulate(replace(PLAN, remote_changes=_changes((17, 10))))
    # 40 MiB by 17, 50 by 22, when save 2 is written until 26; then the last 10.
    assert found.saves[0].remote_s == 27


def test_latencies() -> None:
    """Each write, copy and read-back takes longer. Reads may have a rate of their own."""
    found = simulate(replace(PLAN, saves=1, local_latency_s=0.5, remote_latency_s=0.25))
    (only,) = found.saves
    assert (only.local_s, only.remote_s) == (15.5, 20.75)
    assert found.ended_s == 26
    fast = simulate(replace(found.plan, read_back_rate=100 * MIB))
    assert fast.ended_s == 20.75 + 0.25 + 1


def test_parts_that_are_under_way() -> None:
    """They go on when a save begins; the rest of the copy pauses. A new copy does not begin."""
    plan = replace(PLAN, saves=2, every_s=6, local_rate=50 * MIB, in_flight_bytes=30 * MIB)
    found = simulate(plan)
    # Written from 7 to 9, copied from 9 on. Save 2 is written from 14 to 16: nothing is left.
    assert found.saves[0].remote_s == 14
    slow = simulate(replace(plan, remote_rate=10 * MIB))
    # 50 MiB by 14, 20 until 16, without a pause, and so on.
    assert slow.saves[0].remote_s == 19
    # With 10 MiB: until 15. From 16 on the last 40 take 4 s.
    paused = simulate(replace(plan, remote_rate=10 * MIB, in_flight_bytes=10 * MIB))
    assert paused.saves[0].remote_s == 20


def test_down_and_back() -> None:
    """The copy fails after the timeout, is tried again after pauses, and sends only the rest."""
    found = simulate(
        replace(PLAN, saves=1, timeout_s=2, remote_changes=_changes((17, 0), (40, 20)))
    )
    now_s, failures = 17.0 + 2, 1
    while (now_s := now_s + 0.75 * pause_after(failures)) + 2 <= 40:
        now_s, failures = now_s + 2, failures + 1
    (only,) = found.saves
    assert only.remote_s == pytest.approx(max(now_s, 40) + 60 / 20, abs=1e-6)


@pytest.mark.parametrize("on_lag", ["wait", "skip", "supersede"])
def test_down_for_good(on_lag: str) -> None:
    """It ends, and no save waits for a tier that fails."""
    plan = replace(PLAN, saves=9, on_lag=on_lag, max_lag_s=20, remote_changes=_changes((12, 0)))
    found = simulate(plan)
    assert found.lags_remote_s == []
    # The first copy fails only after the timeout; until then saves may wait for it.
    assert max(found.stalls_s) <= (61 if on_lag == "wait" else 1)
    assert found.stalls_s[-1] == 1
    assert found.lags_local_s == [5] * 9 if on_lag != "wait" else len(found.lags_local_s) == 9


def test_the_newest_copy_is_never_given_up() -> None:
    """However long it has waited; the older one is."""
    down = _changes((12, 0), (500, 20))
    found = simulate(replace(PLAN, saves=2, max_lag_s=20, timeout_s=2, remote_changes=down))
    first, second = found.saves
    assert first.remote_s is None
    assert second.remote_s is not None
    assert second.remote_s > 500


def test_retention_of_the_remote_tier() -> None:
    """It keeps one: of the checkpoints that wait only the newest one is copied."""
    plan = replace(PLAN, saves=6, remote_rate=4 * MIB)
    assert len(simulate(plan).lags_remote_s) == 6
    found = simulate(replace(plan, keep_last=1))
    copied = [one.number for one in found.saves if one.remote_s is not None]
    assert len(copied) < 6
    assert copied[-1] == 6
    assert len(simulate(replace(plan, keep_last=1, every_save=True)).lags_remote_s) == 6


def test_the_faster_tier_is_found() -> None:
    """Nothing is known at first. Then every save goes to the remote tier, which is faster."""
    found = simulate(_PLACED)
    (_, some), (_, rest) = _tiers(found)
    assert [one for one, _ in _tiers(found)] == ["local", "remote"]
    assert some < 10
    assert found.lags_s == [5.0] * some + [3.0] * rest
    assert simulate(_PLACED) == found


@pytest.mark.parametrize(
    ("goal", "tier", "lag_s"), [("bandwidth", "local", 5), ("capacity", "remote", 3)]
)
def test_other_goals(goal: str, tier: str, lag_s: float) -> None:
    """Always one tier, while it works."""
    found = simulate(replace(_PLACED, placement=Placement(goal=goal)))  # type: ignore[arg-type]  # a goal
    assert _tiers(found) == [(tier, 60)]
    assert found.lags_s == [lag_s] * 60


def test_a_link_that_becomes_slow() -> None:
    """Saves go back to the local tier when the remote one is slower, and return to it later."""
    found = simulate(replace(_PLACED, remote_changes=_changes((200, 15), (400, 50))))
    assert [one for one, _ in _tiers(found)] == ["local", "remote", "local", "remote"]
    slow = [one for one in found.saves if one.tier == "remote" and 200 <= one.at_s < 400]
    assert len(slow) <= 2


def test_a_link_that_goes_down() -> None:
    """The save that notices it takes as long as saves to both tiers in turn, and then a local one.

    With the goal "capacity" it takes the timeout instead.
    """
    plan = replace(_PLACED, remote_changes=_changes((250, 0), (400, 50)), timeout_s=30)
    found = simulate(plan)
    assert [one for one, _ in _tiers(found)] == ["local", "remote", "local", "remote"]
    worst = max(found.lags_s)
    assert 1 + (2 + 4) + 4 <= worst <= 1 + 1.1 * (2 + 4) + 4
    assert all(one.durable_s is not None for one in found.saves)
    always = simulate(replace(plan, placement=Placement(goal="capacity")))
    assert max(always.lags_s) == 1 + 30 + 4


@pytest.mark.parametrize("name", ["step", "drift", "dead"])
def test_near_the_oracle(name: str) -> None:
    """Within 5% of the best tier of each save, on rates like those of the live runs."""
    saves, every = 150, 11
    length_s = saves * every
    parts = {
        "step": [(0.35, 15), (0.65, 50)],
        "drift": [(one / 100, round(50 * 0.3 ** (one / 100))) for one in range(1, 100)],
        "dead": [(0.35, 0), (0.475, 50)],
    }[name]
    changes = _changes(*((part * length_s, rate) for part, rate in parts))
    plan = replace(_PLACED, saves=saves, remote_changes=changes, placement=Placement(dwell=20))
    found = simulate(plan)

    def best_s(at_s: float) -> float:
        rate = [50 * MIB, *(one.rate_bytes_per_s for one in changes if one.at_s <= at_s)][-1]
        return 1 + min(4.0, 100 * MIB / rate if rate else 4.0)

    oracle_s = sum(best_s(one.at_s) for one in found.saves)
    assert sum(found.lags_s) <= 1.05 * oracle_s


def test_too_large_for_the_memory() -> None:
    """Training waits for the write to the tier that is chosen."""
    found = simulate(replace(_PLACED, size_bytes=300 * MIB))
    (_, some), (_, rest) = _tiers(found)
    assert found.stalls_s == [12.0] * some + [6.0] * rest


def _random_plan(seed: int) -> TiersPlan:
    random_ = random.Random(seed)
    pick = random_.choice
    ends = [pick([1, 7.3, 30, 200]) for _ in range(random_.randint(0, 8))]
    goals = (Placement(goal=goal, dwell=pick([0, 20])) for goal in ("durable", "capacity"))  # type: ignore[arg-type]  # goals
    return replace(
        PLAN,
        size_bytes=pick([1, 50, 100, 300]) * MIB,
        every_s=pick([1, 5, 30]),
        saves=random_.randint(2, 40),
        local_rate=pick([3, 25, 77]) * MIB,
        local_latency_s=pick([0, 0.1, 3]),
        remote_rate=pick([1, 10, 60]) * MIB,
        remote_latency_s=pick([0, 0.1, 3]),
        remote_changes=_changes(
            *((sum(ends[: place + 1]), pick([0, 0, 1, 50])) for place in range(len(ends)))
        ),
        in_flight_bytes=pick([0, 20 * MIB]),
        read_back_rate=pick([None, 100 * MIB]),
        timeout_s=pick([0.5, 3, 60]),
        placement=pick([None, *goals]),
        keep_last=pick([None, 1, 3]),
        every_save=pick([False, True]),
        on_full=pick(["wait", "skip", "supersede"]),
        on_lag=pick(["wait", "skip", "supersede"]),
        max_lag_s=pick([10, 3600]),
        max_lag_bytes=pick([None, 100 * MIB, 350 * MIB]),
    )


def test_any_plan() -> None:
    """It ends. What is not dropped is durable in a tier, after its copy."""
    for seed in range(60):
        found = simulate(_random_plan(seed))
        assert len(found.saves) == found.plan.saves
        for one in found.saves:
            assert (one.durable_s is not None) == (one.end == "durable"), (seed, one)
            assert one.stall_s >= 0
            assert one.durable_s is None or one.durable_s >= one.at_s + one.stall_s - 1e-9
