"""Placement of copies and of parity."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.dist.replicas import placement
from iobench.dist.replicas.placement import chunk_bytes, chunk_of, parity_groups, partner_nodes
from iobench.errors import UsageError


@given(st.integers(2, 300))
def test_every_node_has_a_partner_that_keeps_one_nodes_copies(count: int) -> None:
    """No node is its own partner, and the load is one node's copies on every node."""
    partners = partner_nodes(count)
    assert sorted(partners) == list(range(count))
    assert all(node != partner for node, partner in enumerate(partners))


@pytest.mark.parametrize(
    ("count", "partners"), [(2, [1, 0]), (3, [1, 2, 0]), (4, [1, 0, 3, 2]), (5, [1, 0, 3, 4, 2])]
)
def test_pairs_and_a_last_ring_of_three(count: int, partners: list[int]) -> None:
    """An even count has pairs; of an odd one, the last three nodes form a ring."""
    assert partner_nodes(count) == partners


def test_one_node_has_no_partner() -> None:
    """One node cannot lose itself and keep a copy."""
    with pytest.raises(UsageError, match="needs 2 nodes or more, this job has 1"):
        partner_nodes(1)
    with pytest.raises(UsageError, match="needs 2 nodes or more, this job has 1"):
        parity_groups([0, 0], 8)


@given(st.integers(2, 40), st.integers(1, 4), st.integers(2, 10), st.booleans())
def test_every_rank_is_in_one_group_of_different_nodes(
    count: int, local: int, size: int, cyclic: bool
) -> None:
    """One failed node takes at most one member of a group; no group is larger than asked."""
    nodes = [rank % count if cyclic else rank // local for rank in range(count * local)]
    groups = parity_groups(nodes, size)
    assert sorted(rank for group in groups for rank in group) == list(range(len(nodes)))
    for group in groups:
        assert len({nodes[rank] for rank in group}) == len(group)
        assert 2 <= len(group) <= (3 if (size, count % 2) == (2, 1) else size)


def test_parity_needs_equal_nodes() -> None:
    """Nodes with other numbers of ranks, and groups of one, are refused with a reason."""
    with pytest.raises(UsageError, match=r"this job has \[1, 2\]; use Partner"):
        parity_groups([0, 0, 1], 2)
    with pytest.raises(UsageError, match="group=1"):
        parity_groups([0, 1], 1)


@given(st.integers(2, 9), st.data())
def test_any_lost_member_is_recovered_from_the_others(members: int, data: st.DataObject) -> None:
    """Rotated parity: the data of one member follow from the other data and parity."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "PIECE", 4096)
        _recovered(members, data)


def _recovered(members: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 60_000), min_size=members, max_size=members))
    lost = data.draw(st.integers(0, members - 1))
    random = np.random.default_rng(0)
    longest = max(chunk_bytes(size, members) for size in sizes)
    rows = np.zeros((members, members - 1, longest), np.uint8)
    whole = [random.integers(0, 256, size, np.uint8) for size in sizes]
    for member, bytes_ in enumerate(whole):
        chunk = chunk_bytes(len(bytes_), members)
        for number in range(members - 1):
            part = bytes_[number * chunk : (number + 1) * chunk]
            rows[member, number, : len(part)] = part
    parity = [
        np.bitwise_xor.reduce([rows[m, chunk_of(m, holder)] for m in range(members) if m != holder])
        for holder in range(members)
    ]
    used = Counter((m, chunk_of(m, h)) for h in range(members) for m in range(members) if m != h)
    assert set(used.values()) == {1}
    assert len(used) == members * (members - 1)
    for holder in set(range(members)) - {lost}:
        others = [m for m in range(members) if m not in (holder, lost)]
        found = np.bitwise_xor.reduce(
            [parity[holder], *(rows[m, chunk_of(m, holder)] for m in others)]
        )
        assert np.array_equal(found, rows[lost, chunk_of(lost, holder)])
