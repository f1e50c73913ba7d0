"""simulate: what happens to each save, compared with times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tier_plans import PLAN

from iobench.tiers.plan import PlannedMemory, TiersPlan
from iobench.tiers.simulation import simulate
from iobench.units import MIB


def _with(**changes: object) -> TiersPlan:
    return replace(PLAN, **changes)  # type: ignore[arg-type]  # fields of TiersPlan


def test_tiers_that_keep_up() -> None:
    """Each save stalls for its copy, and is durable in both tiers before the next one."""
    found = simulate(PLAN)
    assert [one.at_s for one in found.saves] == [10, 21, 32]
    assert found.stalls_s == [1, 1, 1]
    # Copy 1 s, write 4 s. Then 5 s to the remote tier; the read-back ends after the next save.
    assert found.lags_local_s == [5, 5, 5]
    assert found.lags_remote_s[0] == 10
    assert found.first_full() is None
    assert found.lost_node_s == 10 + 4  # just before save 2 is durable: 4 s were trained on
    assert simulate(PLAN) == found


def test_a_copy_pauses_while_a_snapshot_is_written() -> None:
    """And a read-back of the last one is finished before a new copy."""
    found = simulate(_with(saves=2))
    first, second = found.saves
    assert (first.local_s, first.remote_s) == (15, 20)
    # Read back from 20 to 22, when save 2 is written, which ends at 26, and from 26 to 29.
    assert (second.local_s, second.remote_s) == (26, 34)
    assert found.ended_s == 39


def test_a_slow_local_tier_fills_the_memory() -> None:
    """With every_save: writes of 25 s every 11 s. The third save waits for the first write."""
    found = simulate(_with(local_rate=4 * MIB, remote_rate=None, every_save=True))
    assert [one.at_s for one in found.saves] == [10, 21, 32]
    assert [one.memory_wait_s for one in found.saves] == [0, 0, 4]
    assert [one.local_s for one in found.saves] == [36, 61, 86]
    assert found.first_full() == 3
    assert found.lost_local_s is None


def test_the_newest_snapshot_in_the_scarcest_memory_is_written_next() -> None:
    """Without every_save. None is dropped: the second one is written last."""
    memory = (replace(PLAN.memories[0], size_bytes=300 * MIB),)
    found = simulate(_with(local_rate=4 * MIB, remote_rate=None, memories=memory))
    assert [one.end for one in found.saves] == ["durable", "durable", "durable"]
    assert [one.local_s for one in found.saves] == [36, 86, 61]
    assert found.first_full() is None


@pytest.mark.parametrize(
    ("on_full", "ends"),
    [
        ("skip", ["durable", "durable", "skipped"]),
        ("supersede", ["durable", "superseded", "durable"]),
    ],
)
def test_no_stall_when_the_memory_is_full(on_full: str, ends: list[str]) -> None:
    """`skip` drops the new save, `supersede` the oldest snapshot that waits."""
    plan = _with(local_rate=4 * MIB, remote_rate=None, on_full=on_full)
    found = simulate(plan)
    assert [one.end for one in found.saves] == ends
    assert found.stalls_s == [1, 1, 0 if on_full == "skip" else 1]


def test_the_slower_memory_takes_the_overflow() -> None:
    """A snapshot is spread over both; the stall is the time of both parts."""
    fast = PlannedMemory(name="fast", size_bytes=150 * MIB, rate_bytes_per_s=100 * MIB)
    slow = PlannedMemory(name="slow", size_bytes=400 * MIB, rate_bytes_per_s=50 * MIB)
    found = simulate(
        _with(saves=6, memories=(fast, slow), local_rate=MIB, remote_rate=None, every_save=True)
    )
    assert found.stalls_s[:5] == [1, 0.5 + 1, 2, 2, 2]
    assert found.saves[1].used == (150 * MIB, 50 * MIB)
    assert (found.first_use(0), found.first_use(1)) == (1, 2)
    # 5 snapshots fit. The sixth waits until the first one is written, 100 s after its copy.
    assert found.first_full() == 6
    assert found.saves[5].at_s + found.saves[5].memory_wait_s == 111


def test_too_large_for_the_memory() -> None:
    """Every save is synchronous."""
    found = simulate(_with(size_bytes=300 * MIB, remote_rate=None))
    assert found.stalls_s == [12, 12, 12]
    assert found.lags_local_s == [12, 12, 12]


def test_wait_for_the_lag() -> None:
    """A slow remote tier with room for one checkpoint: a save waits while there are more."""
    plan = _with(
        saves=4, remote_rate=4 * MIB, every_save=True, on_lag="wait", max_lag_bytes=100 * MIB
    )
    found = simulate(plan)
    # 25 s for each copy, which does not pause: the lag is above half of its limit.
    assert [one.remote_s for one in found.saves] == [40, 65, 90, 115]
    assert [one.at_s for one in found.saves] == [10, 21, 32, 51]
    assert [one.lag_wait_s for one in found.saves] == [0, 0, 8, 14]
    assert found.stalls_s == [1, 1, 9, 15]


def test_superseded_and_skipped_copies() -> None:
    """Past the limit of bytes the oldest ones are given up, or the new ones are."""
    slow = {"saves": 5, "remote_rate": 2 * MIB, "max_lag_bytes": 200 * MIB}
    old = simulate(_with(on_lag="supersede", **slow))
    assert [one.remote_s is not None for one in old.saves] == [True, False, False, True, True]
    new = simulate(_with(on_lag="skip", **slow))
    assert [one.remote_s is not None for one in new.saves] == [True, True, False, False, False]
    assert not any(one.stall_s > 1 for one in (*old.saves, *new.saves))
