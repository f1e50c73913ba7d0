"""Which rank's checkpoint each rank restores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.bench.ranks.members import same_node, sources_of


@pytest.mark.parametrize(
    ("nodes", "sources"),
    [
        ([0], [0]),
        ([0, 0, 0], [0, 1, 2]),  # one node: its own
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),  # ranks dealt over the nodes in turn
        ([0, 0, 0, 1], [3, 0, 1, 2]),  # more than half on one node
    ],
)
def test_ranks_are_shifted_by_a_node(nodes: list[int], sources: list[int]) -> None:
    assert sources_of(nodes) == sources


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_every_rank_is_read_once_and_by_another_node(nodes: list[int]) -> None:
    """By another node wherever the ranks on the nodes allow it."""
    sources = sources_of(nodes)
    assert sorted(sources) == list(range(len(nodes)))
    largest = max(nodes.count(node) for node in nodes)
    if 2 * largest <= len(nodes):
        assert same_node(nodes, sources) == []
    else:  # so many of the largest node cannot have another source
        assert len(same_node(nodes, sources)) >= 2 * largest - len(nodes)
