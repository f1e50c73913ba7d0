"""A Checkpointer of two real ranks with a ShardedAdamW: each save pins the part of every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offload_training import stock_snapshots

from iobench.checkpoint.store import DirectoryStore
from iobench.offload.rank_directories import rank_directory
from tests.support import rank_offload
from tests.support import rank_offload_checkpoints as job
from tests.support.rank_pool import FirstRanks, RankPool

_STEPS = 7


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The bytes of the parameters after each step, by stock torch in one process."""
    return [rank_offload.bits(one["model"] for one in each) for each in stock_snapshots(_STEPS)]


@pytest.fixture
def pool(ranks: RankPool) -> FirstRanks:
    return ranks.first(2)


def test_saves_pin_the_part_of_each_rank(pool: FirstRanks, tmp_path: Path, expected: list) -> None:
    """Retention releases pins in all ranks; a load goes on with the bits of one process."""
    found = pool.call(job.train, str(tmp_path), 5)
    assert [one["steps"] for one in found] == [[4, 5]] * 2
    assert all(one["bits"] == expected[4] for one in found)
    manifest = DirectoryStore(tmp_path / "runs").manifest(5)
    assert [Path(one.directory).name for one in manifest.pinned] == ["rank-0-of-2", "rank-1-of-2"]
    assert [one.updates for one in manifest.pinned] == [5, 5]
    assert job.held(tmp_path, 2) == job.named(tmp_path, 2)
    again = pool.call(job.train, str(tmp_path), 6, 4)  # step 5 is replaced
    assert [one["begun"]["bits"] for one in again] == [expected[3]] * 2
    assert [one["begun"]["rank"] for one in again] == [0, 1]
    assert [one["start"] for one in again] == [4, 4]
    assert all(one["bits"] == expected[5] and one["steps"] == [5, 6] for one in again)
    assert job.held(tmp_path, 2) == job.named(tmp_path, 2)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, expected: list, before: int, after: int
) -> None:
    """A checkpoint of other ranks is loaded, those that are left stay loadable by both, and the
    parts of the old ranks are removed with the last checkpoint that needs them."""
    directory = str(tmp_path)
    ranks.first(before).call(job.train, directory, 3)
    found = ranks.first(after).call(job.train, directory, 4, 2)  # step 3 is still there
    assert [one["begun"]["bits"] for one in found] == [expected[1]] * after
    assert all(one["bits"] == expected[3] for one in found)
    assert job.held(tmp_path, after) == job.named(tmp_path, after)
    old = [rank_directory(rank, before) for rank in range(before)]
    new = [rank_directory(rank, after) for rank in range(after)]
    assert found[0]["steps"] == [3, 4]  # both of the new ranks: the old ones are gone
    assert found[0]["files"] == sorted(new)
    ranks.first(after).call(job.train, directory, 5, 4, 5)
    back = ranks.first(before).call(job.train, directory, 4, 4)  # saved by the others
    assert [one["begun"]["bits"] for one in back] == [expected[3]] * before
    assert back[0]["files"] == sorted([*old, *new, "ranks.json"])
    again = ranks.first(after).call(job.train, directory, 4, 5)  # the state was elsewhere since
    assert [one["begun"]["bits"] for one in again] == [expected[4]] * after
    assert job.held(tmp_path, after) == job.named(tmp_path, after)


def test_damage_in_one_rank(pool: FirstRanks, tmp_path: Path, expected: list) -> None:
    """All ranks take the checkpoint before, or all get the error."""
    pool.call(job.train, str(tmp_path), 5, None, 2)
    part = tmp_path / "state" / "rank-1-of-2"
    (pinned,) = (
        one
        for one in DirectoryStore(tmp_path / "runs").manifest(4).pinned
        if one.directory.endswith("rank-1-of-2")
    )
    (part / f"extra-{pinned.pin}").write_bytes(b"damaged")
    for one in pool.call(job.train, str(tmp_path), 6, 4):
        assert "found by rank 1" in one["error"]
    found = pool.call(job.train, str(tmp_path), 5, "latest", 1, None, "previous")
    assert [one["begun"]["loaded"] for one in found] == [2, 2]
    assert [one["begun"]["bits"] for one in found] == [expected[1]] * 2
    assert all(one["bits"] == expected[4] for one in found)


@pytest.mark.parametrize(
    "point",
    [
        "iobench.offload.held_pins.HeldPins.hold:before:1:error",
        "iobench.offload.held_pins.HeldPins.durable:after:1:error",
        "iobench.dist.saves.part_writer.PartWriter.write:after:1:error",
    ],
)
def test_a_save_that_fails_in_one_rank(
    pool: FirstRanks, tmp_path: Path, expected: list, point: str
) -> None:
    """It fails in all ranks, nothing of it is visible, and the next save works."""
    found = pool.call(job.save_fails, str(tmp_path), [1, point])
    for one in found:
        assert len(one["errors"]) == 1
        assert "at iobench" in one["errors"][0]
        assert one["steps"] == [1]
        assert one["state"] == {"step": 2}
        assert one["bits"] == expected[1]
    assert job.held(tmp_path, 2) == job.named(tmp_path, 2)
