"""Real ranks save and load: any world size and sharding gives the state of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import rank_states
from tests.support.rank_pool import RankPool
from tests.support.rank_states import LAYOUTS, digest, full

_SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one checkpoint per world size and layout: step 10 * size + layout."""
    directory = tmp_path_factory.mktemp("saved")
    for size in _SIZES:
        for number, layout in enumerate(LAYOUTS[: 4 if size > 1 else 1]):
            step = 10 * size + number
            found = pool.call(rank_states.save, str(directory), step, layout, world=size)
            assert found == ["committed"] * size
    return directory


@pytest.mark.parametrize("saved_by", _SIZES)
@pytest.mark.parametrize("size", _SIZES)
def test_any_world_size(pool: RankPool, saved: Path, saved_by: int, size: int) -> None:
    """Every layout of the save, loaded in another layout: equal by hash."""
    for number in range(4 if saved_by > 1 else 1):
        layout = LAYOUTS[(number + size) % 4]
        step = 10 * saved_by + number
        found = pool.call(rank_states.load, str(saved), step, layout, saved_by, world=size)
        assert found == [digest(full())] * size
