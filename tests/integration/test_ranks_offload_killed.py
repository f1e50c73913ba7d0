"""kill -9 of one rank whose Checkpointer pins a ShardedAdamW: a manifest names durable parts of all
ranks, nothing else is visible, and the next start leaves no pin without a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offload_training import stock_snapshots

from iobench.checkpoint.store import DirectoryStore
from iobench.offload.rank_directories import noted_size
from tests.support import rank_offload
from tests.support import rank_offload_checkpoints as job
from tests.support.rank_pool import PoolError, RankPool

_STEPS = 5
_PINS = "iobench.offload.held_pins.HeldPins"


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The bytes of the parameters after each step, by stock torch in one process."""
    return [rank_offload.bits(one["model"] for one in each) for each in stock_snapshots(_STEPS)]


def _killed(size: int, *args: object) -> None:
    ranks = RankPool(size)
    try:
        with pytest.raises(PoolError, match="the rank ended"):
            ranks.call(job.train, *args)
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("rank", "point", "newest"),
    [
        (1, f"{_PINS}.durable:before:3", 2),  # pinned, and no vote
        (0, "iobench.dist.saves.assembly.Assembly.publish:after:4", 4),  # the others do not know
        (0, "iobench.checkpoint.ledger.Ledger.committed:after:4", 4),  # removed, and not unpinned
    ],
)
def test_a_killed_rank(
    ranks: RankPool, tmp_path: Path, expected: list, rank: int, point: str, newest: int
) -> None:
    _killed(2, str(tmp_path), _STEPS, None, 1, [rank, point])
    steps = DirectoryStore(tmp_path / "runs").steps()
    assert steps[-1] == newest
    for pins, held in zip(job.named(tmp_path, 2), job.held(tmp_path, 2), strict=True):
        assert pins <= held
    found = ranks.first(2).call(job.train, str(tmp_path), _STEPS, "latest")
    assert [one["begun"]["loaded"] for one in found] == [steps[-1]] * 2
    assert [one["begun"]["bits"] for one in found] == [expected[steps[-1] - 1]] * 2
    assert all(one["bits"] == expected[_STEPS - 1] for one in found)
    assert job.held(tmp_path, 2) == job.named(tmp_path, 2)


def test_killed_between_two_histories(ranks: RankPool, tmp_path: Path, expected: list) -> None:
    """Rank 0 has gone back to a checkpoint, rank 1 has not: both have another one with as many
    updates. A resume without a Checkpointer takes one history, and never a part of each."""
    directory = str(tmp_path)
    job_of_two = RankPool(2)
    try:
        with pytest.raises(PoolError, match="the rank ended"):
            job_of_two.call(job.two_histories, directory, [1, f"{_PINS}.abandon_later:before:1"])
    finally:
        job_of_two.kill()
    found = ranks.first(2).call(job.resumed, directory)
    assert [one["updates"] for one in found] == [2, 2]
    assert [one["bits"] for one in found] == [expected[1]] * 2
    assert [one["next"] for one in found] == [expected[2]] * 2
    assert "the newest state that all of them have" in found[0]["said"][0]
    assert found[1]["said"] == []


def test_killed_while_another_number_of_ranks_loads(
    ranks: RankPool, tmp_path: Path, expected: list
) -> None:
    """The conversion is begun again from the same checkpoint."""
    ranks.first(1).call(job.train, str(tmp_path), 3)
    point = "iobench.offload.resharding.convert:after:1"
    _killed(2, str(tmp_path), 3, 2, 1, [1, point])
    assert noted_size(tmp_path / "state").size == 1
    found = ranks.first(2).call(job.train, str(tmp_path), 4, 2)
    assert [one["begun"]["bits"] for one in found] == [expected[1]] * 2
    assert all(one["bits"] == expected[3] for one in found)
    assert job.held(tmp_path, 2) == job.named(tmp_path, 2)
