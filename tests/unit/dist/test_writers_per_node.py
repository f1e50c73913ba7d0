"""The number of writers per node: the fewest that are about as fast as the best."""

from __future__ import annotations

import pytest

from iobench.dist.control import Control
from iobench.dist.world import World
from iobench.dist.writers_per_node import WritersPerNode, fewest_writers, measure_writers
from iobench.writers.buffered import BufferedWriter


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 100.0, 2: 104.0, 4: 90.0}, 1),  # 4 % more is within the noise
        ({1: 100.0, 2: 190.0, 4: 195.0}, 2),
        ({1: 100.0, 2: 200.0, 4: 400.0}, 4),
        ({1: 7.0}, 1),
    ],
)
def test_fewest_writers(rates: dict[int, float], expected: int) -> None:
    """A difference within 5 % does not count."""
    assert fewest_writers(rates) == expected


def test_one_rank_per_node_writes_nothing() -> None:
    """Where there is no choice, nothing is measured."""
    found = measure_writers(Control(World.single()), BufferedWriter(), "/absent")
    assert found == WritersPerNode(writers=1)
