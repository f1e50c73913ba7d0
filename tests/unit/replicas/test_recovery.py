"""The recovery plan: the newest version that all ranks can have, and its sources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iobench.replicas.partner import partner_nodes
from iobench.replicas.recovery import MemoryCopy, StoredCopy, Version, recovery_plan

_OLD, _NEW = Version(1, 10, "a"), Version(2, 20, "a")
Copies = list[MemoryCopy | StoredCopy]


def _own(version: Version, nodes: list[int]) -> Copies:
    return [MemoryCopy(version, rank, len(nodes), node) for rank, node in enumerate(nodes)]


def _partners(version: Version, nodes: list[int]) -> Copies:
    partner = partner_nodes(max(nodes) + 1)
    return [MemoryCopy(version, rank, len(nodes), partner[n]) for rank, n in enumerate(nodes)]


def _without(copies: Copies, *lost: int) -> Copies:
    return [one for one in copies if isinstance(one, StoredCopy) or one.node not in lost]


def test_nothing_is_found_where_nothing_is() -> None:
    """Without copies there is no plan."""
    assert recovery_plan([]) is None


def test_all_holders_and_storage() -> None:
    """Each rank's bytes are in the memory of its node and of the partner, and on storage."""
    plan = recovery_plan([*_own(_NEW, [0, 1]), *_partners(_NEW, [0, 1]), StoredCopy(_NEW)])
    assert plan is not None
    assert (plan.holders, plan.stored) == ({0: (0, 1), 1: (0, 1)}, True)


def test_partial_copies_of_a_newer_save_are_passed_over() -> None:
    """A version that one rank lacks is not chosen; the reason names the rank."""
    plan = recovery_plan([*_own(_OLD, [0, 1]), MemoryCopy(_NEW, 0, 2, 0)])
    assert plan is not None
    assert plan.version == _OLD
    assert plan.passed_over == ((_NEW, "no source has the bytes of rank 1"),)


def test_storage_fills_what_memory_lacks() -> None:
    """A stored version is complete for all ranks; memory serves the ranks that it has."""
    plan = recovery_plan([MemoryCopy(_NEW, 0, 2, 0), StoredCopy(_NEW)])
    assert plan is not None
    assert (plan.holders, plan.stored) == ({0: (0,)}, True)


def test_older_storage_loses_against_newer_memory_and_the_reverse() -> None:
    """The newest complete version is chosen, wherever it is."""
    newer_memory = recovery_plan([*_own(_NEW, [0, 1]), StoredCopy(_OLD)])
    newer_storage = recovery_plan([*_own(_OLD, [0, 1]), StoredCopy(_NEW)])
    assert newer_memory is not None
    assert newer_storage is not None
    assert (newer_memory.version, newer_memory.stored) == (_NEW, False)
    assert (newer_storage.version, newer_storage.ranks) == (_NEW, None)


def test_saves_of_one_step_by_two_starts_are_never_mixed() -> None:
    """Rank 0 has the step of the second start, rank 1 that of the first: neither is complete."""
    first, second = Version(2, 20, "a"), Version(2, 20, "b")
    copies = [MemoryCopy(second, 0, 2, 0), MemoryCopy(first, 1, 2, 1)]
    assert recovery_plan(copies) is None
    plan = recovery_plan([*copies, StoredCopy(_OLD)])
    assert plan is not None
    assert plan.version == _OLD


def test_a_node_with_another_number_still_serves_what_it_holds() -> None:
    """A node that comes back as number 3 has the bytes of rank 0: others read them there."""
    plan = recovery_plan([MemoryCopy(_NEW, 0, 2, 3), MemoryCopy(_NEW, 1, 2, 1)])
    assert plan is not None
    assert plan.holders == {0: (3,), 1: (1,)}


def test_two_partners_are_lost() -> None:
    """A copy survives one node of a pair; with both, the older version on storage is taken."""
    nodes = [0, 1, 2, 3]
    copies = [*_own(_NEW, nodes), *_partners(_NEW, nodes), StoredCopy(_OLD)]
    one = recovery_plan(_without(copies, 2))
    two = recovery_plan(_without(copies, 2, 3))
    assert one is not None
    assert one.version == _NEW
    assert one.holders[2] == (3,)
    assert two is not None
    assert two.version == _OLD
    assert two.passed_over == ((_NEW, "no source has the bytes of ranks 2, 3"),)


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
    plan = recovery_plan([*_without(copies, *lost), StoredCopy(_OLD)])
    assert plan is not None
    assert (plan.version == _NEW) is survives
    for rank in range(len(nodes)):
        assert plan.stored or plan.holders[rank]
        assert lost.isdisjoint(plan.holders.get(rank, ()))
