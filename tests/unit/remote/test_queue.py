"""DrainQueue: states change by compare-and-set, and what no tier has is forgotten."""

from __future__ import annotations

import itertools
import random
from typing import Any, get_args

import pytest

from iobench.checkpoint.save import CopyState
from iobench.remote.drain import late
from iobench.remote.queue import NOT_DURABLE, PENDING, DrainQueue, Queued


def _entry(step: int, state: CopyState = "waiting", **more: Any) -> Queued:
    return Queued(step=step, serial=step, since_s=0.0, created_s=0.0, state=state, **more)


def test_a_move_names_the_state_that_it_expects() -> None:
    """A copy that was given up while it was sent does not become durable."""
    queue, entry = DrainQueue(), _entry(1)
    queue.put(entry)
    assert queue.move(entry, "draining", of=NOT_DURABLE)
    assert queue.move(entry, "dropped", of=PENDING)
    assert not queue.move(entry, "durable", of=["draining"])
    assert not queue.move(entry, "draining", of=NOT_DURABLE)
    found = queue.get(1)
    assert found is not None
    assert (found.state, found.durable_at_s) == ("dropped", None)
    assert not queue.has(entry)
    assert queue.has(entry, ["dropped"])


def test_a_step_that_was_saved_anew_keeps_its_state() -> None:
    """The entry of the earlier save moves nothing."""
    queue = DrainQueue()
    queue.put(_entry(1))
    queue.put(Queued(step=1, serial=9, since_s=0.0, created_s=0.0))
    assert not queue.move(_entry(1), "draining", of=NOT_DURABLE)
    queue.forget(1, _entry(1).serial)
    assert [one.serial for one in queue.not_durable()] == [9]


@pytest.mark.parametrize("state", get_args(CopyState))
@pytest.mark.parametrize("in_remote", [True, False, None])
@pytest.mark.parametrize("local", [True, False])
def test_what_is_forgotten(state: CopyState, in_remote: bool | None, local: bool) -> None:
    """Settled entries of checkpoints that neither tier has; None: the remote one is not known."""
    queue = DrainQueue()
    queue.put(_entry(1, state, local=local))
    queue.forget_settled(None if in_remote is None else lambda _: bool(in_remote))
    there = state in ("durable", "verified")
    kept = local or state in NOT_DURABLE or (there and in_remote is not False)
    assert (queue.get(1) is not None) == kept


def test_ten_thousand_saves_leave_no_growing_list() -> None:
    """Local and remote tier keep three checkpoints each; the remote one fails now and then."""
    queue, local, remote = DrainQueue(), list[int](), list[int]()
    chance, most = random.Random(7), 0
    for step in range(1, 10_001):
        queue.put(_entry(step))
        local.append(step)
        if chance.random() < 0.9:
            entry = queue.next()
            assert entry is not None
            assert queue.move(entry, "durable", of=NOT_DURABLE)
            assert queue.move(entry, "verified", of=["durable"])
            remote = [*remote, entry.step][-3:]
        for old in queue.pending()[3:]:
            assert queue.move(old, "dropped", of=PENDING)
        dropped = [one for one in local[:-3] if one not in queue.unsettled(local)]
        local = [one for one in local if one not in dropped]
        for step in dropped:
            queue.retired(step)
        queue.forget_settled(remote.__contains__)
        most = max(most, len(queue.entries()))
    assert most <= 10
    assert {one.step for one in queue.entries()} >= {*local, *remote}


def test_the_order_of_copies() -> None:
    """The last saved one first, or the oldest one; then what is to be read back."""
    for in_order, expected in ((False, [3, 1, 2]), (True, [1, 3, 2])):
        queue = DrainQueue(in_order=in_order)
        for step in (1, 2, 3):
            queue.put(_entry(step, "durable" if step == 2 else "waiting"))
        order = []
        for _ in itertools.repeat(None, 3):
            entry = queue.next()
            assert entry is not None
            order.append(entry.step)
            assert queue.move(entry, "verified", of=PENDING)
        assert order == expected


def test_what_has_waited_too_long() -> None:
    """It is exact at the limit."""
    three = [
        Queued(step=step, serial=step, since_s=since_s, created_s=0.0)
        for step, since_s in ((3, 9.0), (2, 5.0), (1, 1.0))
    ]
    assert late(three, 9.0, 10.0) == []
    assert [one.step for one, _ in late(three, 4.9, 10.0)] == [2, 1]
    assert late(three, 5.0, 10.0)[0][1] == "it waited 9 s, max_backlog is 5 s"
