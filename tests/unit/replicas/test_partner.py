"""Partner: which node keeps the copies of a rank, and its options."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import OptionError, UsageError
from iobench.replicas.partner import Partner, partner_nodes


@given(st.integers(2, 300))
def test_every_node_has_a_partner_that_keeps_one_nodes_copies(count: int) -> None:
    """No node is its own partner, and the load is one node's copies on every node."""
    partners = partner_nodes(count)
    assert sorted(partners) == list(range(count))
    assert all(node != partner for node, partner in enumerate(partners))


def test_pairs_and_a_last_ring_of_three() -> None:
    """An even count has pairs; of an odd one, the last three nodes form a ring. One node cannot
    lose itself and keep a copy."""
    assert [partner_nodes(count) for count in (2, 3, 4, 5)] == [
        *([1, 0], [1, 2, 0], [1, 0, 3, 2], [1, 0, 3, 4, 2])
    ]
    with pytest.raises(UsageError, match="needs 2 nodes or more, this job has 1"):
        partner_nodes(1)


def test_each_rank_has_a_receiver_on_another_node() -> None:
    """Node numbers need not be consecutive, nor have the same number of ranks."""
    assert Partner().receivers([0, 0, 3, 7, 7, 7, 9]) == [2, 2, 0, 6, 6, 6, 3]
    assert Partner().receivers([0, 1, 0, 1]) == [1, 0, 3, 2]
    assert Partner().receivers([0, 0]) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"share": 0}, "share=0: more than 0"),
        ({"share": 2.0}, "share=2.0"),
        ({"rate": 0}, "rate=0: must be at least 1 byte"),
        ({"memory": "many"}, "memory"),
        ({"keep": "for ever"}, "keep"),
    ],
)
def test_options_are_checked(options: dict[str, Any], told: str) -> None:
    """At once, before a rank connects."""
    with pytest.raises(OptionError, match=told):
        Partner(**options)
