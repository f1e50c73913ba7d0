"""LocalCopies: the background waits until all ranks of the node have copied, and not for long."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from iobench.dist.local_copies import LocalCopies
from iobench.dist.world import World


class _Time:
    """A clock that only `sleep` and the test move; `then` is called in each sleep."""

    def __init__(self) -> None:
        self.now_s, self.sleeps = 0.0, list[float]()
        self.then: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps.append(seconds)
        self.then()


@pytest.fixture
def time() -> _Time:
    return _Time()


def _world(rank: int, local_size: int = 2, node: int = 0) -> World:
    size = local_size * (node + 1)
    return replace(
        World.single(),
        size=size,
        rank=node * local_size + rank,
        local_size=local_size,
        local_rank=rank,
        node=node,
        nodes=node + 1,
    )


def _joined(time: _Time, *worlds: World) -> list[LocalCopies]:
    made = [LocalCopies(world, clock=time, sleep=time.sleep) for world in worlds]
    places = [one.place for one in made]
    for one in made:
        one.join(places)
    return made


def _copies(one: LocalCopies, time: _Time, number: int, copy_s: float = 1.0) -> None:
    """Copy a save in `copy_s` seconds."""
    one.begins()
    time.now_s += copy_s
    one.ended(number)


def test_no_wait_after_all_have_copied(time: _Time) -> None:
    """The last rank of the node begins to write at once; one that is ahead counts as well."""
    first, second = _joined(time, _world(0), _world(1))
    _copies(second, time, 3)
    _copies(first, time, 2)
    assert first.wait(2) == 0.0
    assert time.sleeps == []


@pytest.mark.parametrize("waits", [0, 1])
def test_waits_for_the_rank_that_still_copies(time: _Time, waits: int) -> None:
    """Until it has copied this save: the save before does not count."""
    ranks = _joined(time, _world(0), _world(1))
    for one in ranks:
        _copies(one, time, 1)
    own, other = ranks[waits], ranks[1 - waits]
    _copies(own, time, 2)

    def third() -> None:
        if len(time.sleeps) == 3:
            other.ended(2)

    time.then = third
    assert own.wait(2) == pytest.approx(sum(time.sleeps))
    assert len(time.sleeps) == 3


@pytest.mark.parametrize("copy_s", [0.0, 0.001, 1.0, 60.0])
def test_the_wait_ends_without_the_other_rank(time: _Time, copy_s: float) -> None:
    """A rank that was killed or stopped in its copy delays the others by twice their own copy."""
    first, _ = _joined(time, _world(0), _world(1))
    _copies(first, time, 1, copy_s)
    assert 2 * copy_s + 0.05 <= first.wait(1) <= 2 * copy_s + 0.05 + 0.02
    assert len(time.sleeps) < 7000  # they take little of the CPU


def test_ranks_that_are_absent_or_have_left(time: _Time) -> None:
    """No rank waits for them: a launcher may tell too many, and a closed one makes no copies."""
    first, second = _joined(time, _world(0, local_size=4), _world(1, local_size=4))
    _copies(first, time, 1)
    second.ended(1)
    assert first.wait(1) == 0.0
    second.close()
    _copies(first, time, 2)
    assert first.wait(2) == 0.0


def test_nodes_do_not_wait_for_each_other(time: _Time) -> None:
    """Each node has its own memory file."""
    ranks = _joined(time, _world(0), _world(1), _world(0, node=1), _world(1, node=1))
    for one in ranks[:2]:
        _copies(one, time, 1)
    assert ranks[0].wait(1) == ranks[1].wait(1) == 0.0
    assert ranks[2].wait(1) > 0


def test_one_rank_of_a_node_has_no_memory_file(time: _Time) -> None:
    """There is no other rank to wait for."""
    (alone,) = _joined(time, _world(0, local_size=1))
    assert alone.place[2] is None
    alone.ended(1)
    assert alone.wait(1) == 0.0
    alone.close()


def test_a_node_without_local_rank_0(time: _Time) -> None:
    """Nothing is offered, and nobody waits."""
    (second,) = _joined(time, _world(1))
    _copies(second, time, 1)
    assert second.wait(1) == 0.0


def test_another_file_is_not_opened(time: _Time) -> None:
    """In another process namespace the path may name any file. To open a pipe would block."""
    first, second = (LocalCopies(_world(rank), clock=time, sleep=time.sleep) for rank in (0, 1))
    host, node, offer = first.place
    assert isinstance(offer, list)
    read, write = os.pipe()
    try:
        for path in (f"/proc/self/fd/{read}", "/proc/self/fd/99999"):
            with pytest.warns(RuntimeWarning, match="cannot see the copies of the other ranks"):
                second.join([[host, node, [path, offer[1]]]])
            _copies(second, time, 1)
            assert second.wait(1) == 0.0
    finally:
        os.close(read)
        os.close(write)


def test_close_frees_the_memory(time: _Time) -> None:
    """No descriptor and no mapping is left. A second call does nothing."""
    first, second = _joined(time, _world(0), _world(1))
    offer = first.place[2]
    assert isinstance(offer, list)
    path, name = offer
    assert os.readlink(path) == f"/memfd:{name} (deleted)"
    maps = Path("/proc/self/maps")
    assert maps.read_text().count(name) == 2
    for one in (first, second, first):
        one.close()
    assert not os.path.lexists(path)
    assert name not in maps.read_text()
    assert first.wait(1) == second.wait(1) == 0.0


def test_a_dropped_object_leaves_no_descriptor(time: _Time) -> None:
    """As after a constructor that failed."""
    path = LocalCopies(_world(0), clock=time).place[2][0]  # type: ignore[index]
    assert not os.path.lexists(path)
