"""Pins of a ShardedAdamW as clones on xfs: in each rank, in its checkpoints and their copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.offload_training import stock_snapshots

from iobench.offload.files import read_layout
from iobench.offload.rank_directories import rank_directory
from iobench.offload.record_areas import read_records
from iobench.units import MIB
from tests.support import rank_offload
from tests.support import rank_offload_tiers as job
from tests.support.rank_offload_checkpoints import held, named
from tests.support.rank_pool import PoolError, RankPool

pytestmark = pytest.mark.root

_STEPS = 6
_CLONES = {"clone_pins": True}


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The bytes of the parameters after each step, by stock torch in one process."""
    return [rank_offload.bits(one["model"] for one in each) for each in stock_snapshots(_STEPS)]


def _check(base: Path, size: int) -> None:
    """Two generations are reserved in each rank, and each pin is a clone; no other is left."""
    for rank in range(size):
        directory = base / "state" / rank_directory(rank, size)
        layout = read_layout(directory)
        assert (layout.clones, layout.slots) == (True, 2)
        pins = {one.generation for one in read_records(directory, layout)[0].pins}
        found = [re.fullmatch(r"pin-(\d+)\.(\w+)", path.name) for path in directory.iterdir()]
        clones = {(int(one[1]), one[2]) for one in found if one}
        assert clones == {(one, name) for one in pins for name in ("state", "parameters")}
    assert held(base, size) == named(base, size)


def test_clones_of_each_rank(
    ranks: RankPool, new_filesystem: Callable[..., Path], tmp_path: Path, expected: list
) -> None:
    """A load from clones, by other ranks too, and from a copy of them on another file system."""
    base, there = new_filesystem("xfs", 320 * MIB), str(tmp_path / "remote")
    own = [str(base), there, {}]
    ranks.first(2).call(job.train, *own, 4, None, None, {**_CLONES, "wait": False})
    _check(base, 2)
    found = ranks.first(2).call(job.train, *own, 5, 3)
    assert [one["begun"]["bits"] for one in found] == [expected[2]] * 2
    assert all(one["bits"] == expected[4] and one["said"] == [] for one in found)
    _check(base, 2)
    found = ranks.first(3).call(job.train, *own, 6, 5)
    assert [one["begun"]["bits"] for one in found] == [expected[4]] * 3
    _check(base, 3)
    job.assert_whole(Path(there))
    found = ranks.first(2).call(job.train, str(tmp_path / "new"), there, {}, 6, 6)
    assert [one["begun"]["bits"] for one in found] == [expected[5]] * 2


def test_killed_before_a_clone(
    ranks: RankPool, new_filesystem: Callable[..., Path], tmp_path: Path, expected: list
) -> None:
    """One rank has the clone of a pin and the other one has not: no checkpoint names it, and the
    next start removes it."""
    base, there = new_filesystem("xfs", 320 * MIB), str(tmp_path / "remote")
    lost = RankPool(2)
    kill = [1, "iobench.offload.clones.PinClones.make:before:2"]
    try:
        with pytest.raises(PoolError, match="the rank ended"):
            lost.call(job.train, str(base), there, {}, 3, None, kill, _CLONES)
    finally:
        lost.kill()
    found = ranks.first(2).call(job.train, str(base), there, {}, 3, "latest")
    assert [one["begun"]["bits"] for one in found] == [expected[0]] * 2
    assert [one["bits"] for one in found] == [expected[2]] * 2
    _check(base, 2)
