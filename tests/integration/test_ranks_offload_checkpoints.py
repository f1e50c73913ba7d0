"""A Checkpointer of two real ranks with a ShardedAdamW: each save pins the part of every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offload_training import stock_snapshots

from iobench.checkpoint.store import DirectoryStore
from iobench.offload.rank_directories import rank_directory
from tests.support import rank_offload
from tests.support import rank_offload_checkpoints as job
from tests.support.rank_pool import FirstRanks, PoolError, RankPool

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
