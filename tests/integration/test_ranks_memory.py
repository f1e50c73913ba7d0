"""Memory tiers of several ranks: each rank has its own, and all decide alike."""

from pathlib import Path

import pytest

from iobench import load_checkpoint
from iobench.units import MIB
from tests.support import rank_memory, rank_saves

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="there is no tmpfs at /dev/shm"
)

_SLOW = "memory of /dev/shm"


def test_snapshots_fill_both_memories(ranks, tmp_path) -> None:
    """Six wait in each rank, are written in one order, and the newest is loaded from memory."""
    local = tmp_path / "local"
    found = ranks.first(2).call(rank_memory.spilled, str(local), None)
    for rank, one in enumerate(found):
        tiers = [tier for ((tier, state),) in one["volatile"] if state == "volatile"]
        assert tiers == ["memory", "memory", *[_SLOW] * 4]
        (first, size, used), (second, _, more) = one["used"]
        assert (first, second, size) == ("memory", _SLOW, 2 * MIB + MIB // 2)
        assert used > 2 * MIB
        assert used + more >= 6 * MIB
        assert one["order"] == [1, 2, 3, 4, 5, 6]
        assert one["status"] == ["committed"] * 6
        assert one["copies"] == [["volatile", "durable"]] * 6
        assert one["steps"] == [1, 2, 3, 4, 5, 6]
        assert one["loaded"] == [6, [6.0], 60 + rank]
        assert one["sources"] == {_SLOW: "read"}
        assert one["first"] == [[1.0], 10 + rank]
        assert one["latest"] == 5
    assert load_checkpoint(local)["w"].unique().tolist() == [5]
    assert rank_saves.leftovers(str(local)) == []


def test_what_retention_would_drop_is_superseded(ranks, tmp_path) -> None:
    """In all ranks."""
    found = ranks.first(3).call(rank_memory.spilled, str(tmp_path / "local"), 1)
    for one in found:
        assert one["status"] == ["committed", *["dropped"] * 4, "committed"]
        assert one["order"] == [1, 6]
        assert one["steps"] == [6]
        assert one["copies"][5] == ["volatile", "durable"]
        assert one["copies"][1] == []


@pytest.mark.parametrize(
    ("on_full", "expected"),
    [
        ("skip", ["committed", "committed", "skipped", "skipped"]),
        ("drop", ["committed", "dropped", "dropped", "committed"]),
        ("wait", ["committed"] * 4),
    ],
)
def test_full_in_one_rank(ranks, tmp_path, on_full, expected) -> None:
    """Rank 1 has memory for two snapshots, the others for five: all ranks decide by the two."""
    steps = [1, 2, 3, 4]
    call = rank_memory.full_memory
    found = ranks.first(3).call(call, str(tmp_path / "local"), on_full, steps, {})
    assert found == [expected] * 3


def test_a_limit_is_lowered_in_one_rank(ranks, tmp_path) -> None:
    """The next saves are skipped in all ranks, until there is memory again."""
    found = ranks.first(2).call(rank_memory.lowered, str(tmp_path / "local"))
    assert found == [[["committed", "skipped", "skipped", "committed"], [1, 4]]] * 2


def test_no_memory_for_a_single_snapshot(ranks, tmp_path) -> None:
    """The sizes in the rank that lacks memory, its number in the others; nothing waits for ever."""
    found = ranks.first(2).call(rank_memory.nothing_fits, str(tmp_path / "local"))
    (error, prepared, *rest), (own, own_prepared, *_) = found
    assert error.startswith("RankError: rank 1 ")
    assert prepared.startswith("RankError: rank 1 ")
    for text in (own, own_prepared):
        assert text.startswith("StateError: a snapshot of 1.00 MiB does not fit the memory tiers")
        assert "512.00 KiB of memory" in text
    for one in found:
        assert one[2:] == rest == ["committed", [2], ["failed", "committed"]]


def test_a_state_that_grows(ranks, tmp_path) -> None:
    """All ranks wait for the smaller snapshots and use their memory."""
    found = ranks.first(2).call(rank_memory.grown, str(tmp_path / "local"))
    assert found == [[["committed"] * 4, [1, 2, 3, 4], 4.0]] * 2


def test_a_damaged_snapshot(ranks, tmp_path) -> None:
    """The piece comes from storage; the next load of all ranks does too."""
    local = str(tmp_path / "local")
    found = ranks.first(2).call(rank_memory.damaged, local)
    for one in found:
        assert one["right"] == [one["expected"]] * 3
        assert one["whole"] == {"memory": "read"}
        assert one["sources"][1] == {local: "read"}
    read = found[1]["sources"][0]
    assert "__1_0.distcp is damaged" in read["memory"]
    assert read[local].startswith("read ")
    assert any("is damaged" in text for text in found[1]["said"])


@pytest.mark.parametrize(
    "options",
    [
        {"on_full": "wait", "remote": {"every_save": True}},
        {"on_full": "skip", "lazy": True},
        {"on_full": "drop", "keep": 2, "remote": {}},
    ],
    ids=["wait", "skip", "drop"],
)
def test_ranks_at_different_speeds(ranks, tmp_path, options) -> None:
    """Random pauses and sizes of memory in each rank: the same saves have the same ends."""
    found = ranks.first(3).call(rank_memory.many, str(tmp_path / "local"), 7, 20, options)
    statuses, steps, newest = found[0]
    assert found == [found[0]] * 3
    assert set(statuses) <= {"committed", "dropped", "skipped"}
    written = [step for step, status in enumerate(statuses) if status == "committed"]
    assert newest == float(written[-1])
    assert set(steps) <= set(written)
