"""Offloaded state of two real ranks: the bits of one process, and one step after every crash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.offload_training import stock_snapshots

from iobench.offload.rank_directories import rank_directory, records_in
from tests.support import rank_offload
from tests.support.rank_pool import FirstRanks, PoolError, RankPool

_STEPS = 5


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The bytes of the parameters after each step, by stock torch in one process."""
    return [rank_offload.bits(one["model"] for one in each) for each in stock_snapshots(_STEPS)]


@pytest.fixture
def pool(ranks: RankPool) -> FirstRanks:
    return ranks.first(2)


def _check(found: list[dict[str, Any]], updates: int, expected: list[list[list[int]]]) -> None:
    for one in found:
        assert (one["updates"], one["durable"]) == (updates, updates)
        assert one["bits"] == expected[updates - 1]


def test_ranks_have_the_bits_of_one_process(
    pool: FirstRanks, tmp_path: Path, expected: list
) -> None:
    """Also after a resume, from the newest step and from a pin, which has the extra of its rank."""
    directory = str(tmp_path / "state")
    first = pool.call(rank_offload.train, directory, 3, [2])
    _check(first, 3, expected)
    assert first[0]["files"] == ["rank-0-of-2", "rank-1-of-2"]
    assert [one["pinned"] for one in first] == [[2], [2]]
    second = pool.call(rank_offload.train, directory, 4, [], "latest")
    assert [one["begun"] for one in second] == [expected[2]] * 2
    _check(second, 4, expected)
    third = pool.call(rank_offload.train, directory, 5, [], 2)
    assert [one["begun"] for one in third] == [expected[1]] * 2
    assert [one["extra"] for one in third] == [{"rank": 0}, {"rank": 1}]
    assert [one["lr"] for one in third] == [1e-2] * 2
    _check(third, 5, expected)


def test_engines_in_processes(pool: FirstRanks, tmp_path: Path, expected: list) -> None:
    """Each rank has an engine process, and they name the history alike."""
    found = pool.call(rank_offload.train, str(tmp_path / "state"), 2, [2], None, "process")
    _check(found, 2, expected)
    names = [
        [one.name for one in records_in(tmp_path / "state" / rank_directory(rank, 2))]
        for rank in (0, 1)
    ]
    assert names[0] == names[1]
    assert names[0][0].history


def test_a_rank_that_is_one_step_behind(pool: FirstRanks, tmp_path: Path, expected: list) -> None:
    """All go on from the newest step that all have; the newer one of a rank is abandoned."""
    directory = tmp_path / "state"
    pool.call(rank_offload.train, str(directory), 3, [])
    shutil.copytree(directory / "rank-1-of-2", tmp_path / "behind")
    pool.call(rank_offload.train, str(directory), 4, [], "latest")
    shutil.rmtree(directory / "rank-1-of-2")
    shutil.copytree(tmp_path / "behind", directory / "rank-1-of-2")
    found = pool.call(rank_offload.train, str(directory), 3, [], "latest")
    _check(found, 3, expected)  # rank 0 had step 4
    shutil.rmtree(directory / "rank-1-of-2")  # again: rank 0 must not offer the abandoned step 4
    shutil.copytree(tmp_path / "behind", directory / "rank-1-of-2")
    _check(pool.call(rank_offload.train, str(directory), 5, [], "latest"), 5, expected)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, expected: list, before: int, after: int
) -> None:
    """The state is written anew, the old files go, and the bits go on."""
    directory = str(tmp_path / "state")
    ranks.first(before).call(rank_offload.train, directory, 3, [])
    found = ranks.first(after).call(rank_offload.train, directory, 5, [], "latest")
    assert [one["begun"] for one in found] == [expected[2]] * after
    _check(found, 5, expected)
    assert found[0]["files"] == [f"rank-{rank}-of-{after}" for rank in range(after)]


def test_what_cannot_be_continued(pool: FirstRanks, ranks: RankPool, tmp_path: Path) -> None:
    """One error in every rank, and nothing is left open."""
    directory = str(tmp_path / "state")
    with pytest.raises(PoolError, match="holds no state that all ranks of a job have"):
        pool.call(rank_offload.train, directory, 3, [], "latest")
    pool.call(rank_offload.train, directory, 1, [1])
    with pytest.raises(PoolError, match="already holds the state of a training"):
        pool.call(rank_offload.train, directory, 3, [])
    with pytest.raises(PoolError, match="holds the state of a job of 2 ranks"):
        ranks.first(1).call(rank_offload.train, directory, 3, [])
    with pytest.raises(PoolError, match="step 7 is not pinned in all ranks; pinned in all: 1"):
        pool.call(rank_offload.train, directory, 3, [], 7)
    pool.call(rank_offload.train, directory, 2, [], "pinned")


@pytest.mark.parametrize(
    "point",
    [
        "iobench.offload.store.GenerationStore.commit:after:3",
        "iobench.offload.store.GenerationStore.pin:before:1",
    ],
)
def test_a_killed_rank(point: str, tmp_path: Path, expected: list) -> None:
    """The other rank gets an error that names it; both go on from the same step afterwards."""
    directory = str(tmp_path / "state")
    job = RankPool(2)
    try:
        with pytest.raises(PoolError, match=r"rank 1 \(host .*\)"):
            job.call(rank_offload.train, directory, 5, [2, 4], None, "thread", [1, point])
    finally:
        job.kill()
    job = RankPool(2)
    try:
        found = job.call(rank_offload.train, directory, 5, [], "latest")
        job.close()
    finally:
        job.kill()
    begun = found[0]["begun"]
    assert begun in expected[1:4]
    assert found[1]["begun"] == begun
    _check(found, 5, expected)
