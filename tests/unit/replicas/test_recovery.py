"""The recovery plan: the newest version that all ranks can have, and its sources. Partner: which
node keeps the copies of a rank, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import OptionError, ReplicaError, UsageError
from iobench.replicas.directory import SaveHeader, Version
from iobench.replicas.partner import Partner, partner_nodes
from iobench.replicas.replicator import MemoryCopy, recovery_plan

_OLD, _NEW = Version(1, 10, "a"), Version(2, 20, "a")
Copies = list[MemoryCopy]


def _own(version: Version, nodes: list[int]) -> Copies:
    return [MemoryCopy(version, rank, len(nodes), node) for rank, node in enumerate(nodes)]


def _partners(version: Version, nodes: list[int]) -> Copies:
    partner = partner_nodes(max(nodes) + 1)
    return [MemoryCopy(version, rank, len(nodes), partner[n]) for rank, n in enumerate(nodes)]


def _without(copies: Copies, *lost: int) -> Copies:
    return [one for one in copies if one.node not in lost]


_MIXED: Copies = [
    MemoryCopy(Version(2, 20, "b"), 0, 2, 0),
    MemoryCopy(Version(2, 20, "a"), 1, 2, 1),
]
"""Rank 0 has the step of the second start, rank 1 that of the first: neither is complete."""


@pytest.mark.parametrize(
    ("copies", "stored", "version", "holders"),
    [
        # Each rank's bytes are in the memory of its node and of the partner, and on storage.
        (
            [*_own(_NEW, [0, 1]), *_partners(_NEW, [0, 1])],
            *([_NEW], _NEW, {0: (0, 1), 1: (0, 1)}),
        ),
        # A stored version is complete for all ranks; memory serves the ranks that it has.
        ([MemoryCopy(_NEW, 0, 2, 0)], [_NEW], _NEW, {0: (0,)}),
        # The newest complete version is chosen, wherever it is.
        (_own(_NEW, [0, 1]), [_OLD], _NEW, {0: (0,), 1: (1,)}),
        (_own(_OLD, [0, 1]), [_NEW], _NEW, {}),
        ([*_own(_OLD, [0, 1]), MemoryCopy(_NEW, 0, 2, 0)], [], _OLD, {0: (0,), 1: (1,)}),
        (_MIXED, [_OLD], _OLD, {}),
        # A node that comes back as number 3 has the bytes of rank 0: others read them there.
        ([MemoryCopy(_NEW, 0, 2, 3), MemoryCopy(_NEW, 1, 2, 1)], [], _NEW, {0: (3,), 1: (1,)}),
    ],
)
def test_the_newest_version_that_is_complete(
    copies: Copies, stored: list[Version], version: Version, holders: dict[int, tuple[int, ...]]
) -> None:
    plan = recovery_plan(copies, stored)
    assert plan is not None
    assert (plan.version, plan.holders, plan.stored) == (version, holders, version in stored)
    assert plan.ranks == (2 if holders else None)


def test_nothing_is_found_where_nothing_is_complete() -> None:
    """Saves of one step by two starts are never mixed."""
    assert recovery_plan([]) is None
    assert recovery_plan(_MIXED) is None


@given(
    st.integers(2, 9),
    st.integers(1, 3),
    st.booleans(),
    st.sets(st.integers(0, 8)),
)
def test_what_survives_the_loss_of_nodes(
    count: int, local: int, partners: bool, lost: set[int]
) -> None:
    """The plan has the new version exactly if the copies can lose these nodes."""
    nodes = [rank // local for rank in range(count * local)]
    lost = {node for node in lost if node < count}
    copies = _own(_NEW, nodes)
    if partners:
        copies += _partners(_NEW, nodes)
        partner = partner_nodes(count)
        survives = not any(partner[node] in lost for node in lost)
    else:
        survives = not lost
    survives = survives and len(lost) < count
    plan = recovery_plan(_without(copies, *lost), [_OLD])
    assert plan is not None
    assert (plan.version == _NEW) is survives
    for rank in range(len(nodes)):
        assert plan.stored or plan.holders[rank]
        assert lost.isdisjoint(plan.holders.get(rank, ()))


@given(st.integers(2, 300))
def test_every_node_has_a_partner_that_keeps_one_nodes_copies(count: int) -> None:
    """No node is its own partner, and the load is one node's copies on every node."""
    partners = partner_nodes(count)
    assert sorted(partners) == list(range(count))
    assert all(node != partner for node, partner in enumerate(partners))


def test_pairs_and_a_last_ring_of_three() -> None:
    """An even count has pairs; of an odd one, the last three nodes form a ring. One node cannot
    lose itself and keep a copy. Node numbers need not be consecutive, nor have the same number of
    ranks."""
    assert [partner_nodes(count) for count in (2, 3, 4, 5)] == [
        *([1, 0], [1, 2, 0], [1, 0, 3, 2], [1, 0, 3, 4, 2])
    ]
    with pytest.raises(UsageError, match="needs 2 nodes or more, this job has 1"):
        partner_nodes(1)
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"12345678[]", "the header is damaged"),
        (xxhash.xxh3_64_digest(b"[]") + b"[]", "the header is of another version"),
    ],
)
def test_a_header_that_cannot_be_read(data: bytes, message: str) -> None:
    """Another version of iobench may have left it: storage is read instead."""
    with pytest.raises(ReplicaError, match=f"the replica of rank 1: {message}"):
        SaveHeader.parse(data, "the replica of rank 1")
