"""What ranks choose together: the newest state that all have, whatever a crash has left."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import DataMismatchError, UsageError
from iobench.offload.agreement import (
    GenerationOffer,
    chosen,
    kept_records,
    offered_records,
    passed_over,
)
from iobench.offload.record import ROW, GenerationRecord, Pin, StateName


def _record(
    sequence: int, updates: int, pins: tuple[Pin, ...] = (), *, history: str = "a"
) -> GenerationRecord:
    return GenerationRecord(
        sequence=sequence,
        generation=sequence,
        updates=updates,
        rows=np.zeros(1, dtype=ROW),
        counts=np.zeros(1, dtype=np.uint64),
        groups=[{}],
        pins=pins,
        history=history,
    )


def test_an_abandoned_generation_is_not_offered() -> None:
    """A training that went back from 6 to 5 updates has abandoned 6; damage does not count."""
    again = replace(_record(8, 5), generation=5)
    records = [again, _record(6, 6), _record(5, 5), _record(4, 4)]
    assert [one.updates for one in kept_records(records)] == [5, 4]
    assert [one.updates for one in kept_records([_record(9, 6), *records])] == [6, 5, 4]
    damaged = [replace(again, damaged=True), _record(4, 4)]
    assert [one.updates for one in kept_records(damaged)] == [4]


def test_a_tentative_generation_abandons_nothing() -> None:
    """It is offered if it is the newest; the one before stays until it counts."""
    tentative = replace(_record(9, 3), tentative=True)
    records = [tentative, _record(8, 8), _record(7, 7)]
    assert [one.updates for one in kept_records(records)] == [3, 8, 7]
    assert not GenerationOffer.of(records).only_tentative
    assert GenerationOffer.of([tentative]).only_tentative
    adopted = replace(records[1], sequence=10)
    assert [one.updates for one in kept_records([adopted, *records])] == [8, 7]
    counts = replace(tentative, sequence=10, tentative=False)
    assert [one.updates for one in kept_records([counts, *records])] == [3]


def _named(*updates: int, history: str = "a") -> tuple[StateName, ...]:
    return tuple(StateName(history, one) for one in updates)


def _offer(*updates: int, pins: tuple[tuple[int, int], ...] = ()) -> GenerationOffer:
    return GenerationOffer(
        states=_named(*updates), pins=tuple((step, StateName("a", one)) for step, one in pins)
    )


def test_offers_of_records() -> None:
    """The newest first, then pins that training has abandoned. JSON gives it back."""
    pins = (Pin(4, 40, None), Pin(6, 60, None))
    records = [_record(9, 5, pins), _record(6, 6), _record(4, 4)]
    offer = GenerationOffer.of(records)
    assert offer == _offer(5, 4, 6, pins=((40, 4), (60, 6)))
    assert GenerationOffer.from_json(json.loads(json.dumps(offer.to_json()))) == offer
    assert GenerationOffer.of([]) == _offer()
    old = [replace(one, history="") for one in records]  # 6 updates of which history?
    assert [one.updates for one in offered_records(old)] == [5, 4]


@given(ranks=st.integers(1, 5), last=st.integers(1, 9), ahead=st.sets(st.integers(0, 4)))
def test_a_crash_leaves_a_common_step(ranks: int, last: int, ahead: set[int]) -> None:
    """Whoever has committed the next step: all have the step before, and it is the one chosen."""
    offers = [_offer(last + 1, last) if rank in ahead else _offer(last) for rank in range(ranks)]
    everyone = ahead >= set(range(ranks))
    wanted = StateName("a", last + 1 if everyone else last)
    assert chosen(offers, "latest", "state") == (wanted, None)
    assert passed_over(offers, wanted) == ""


def test_equal_updates_of_two_histories() -> None:
    """They are never one state. The ranks take what all of them have, and say what is newer."""
    one = GenerationOffer(states=(*_named(7, 6, history="b"), *_named(5)), pins=())
    other = GenerationOffer(states=(*_named(7, 6, history="c"), *_named(5)), pins=())
    assert chosen([one, other], "latest", "state") == (StateName("a", 5), None)
    assert "rank 0 has 7, 6; rank 1 has 7, 6 updates" in passed_over([one, other], _named(5)[0])
    with pytest.raises(DataMismatchError, match="no generation in common"):
        chosen([one, replace(other, states=_named(7, 6))], "latest", "state")
    pinned = [replace(offer, pins=((70, offer.states[0]),)) for offer in (one, other)]
    with pytest.raises(UsageError, match="step 70 is not pinned in all ranks"):
        chosen(pinned, 70, "state")


def test_pins_that_all_ranks_have() -> None:
    """By step and state; the newest of them, or the wanted one."""
    ahead = _offer(8, 7, 6, pins=((80, 8), (60, 6)))
    behind = _offer(7, 6, 4, pins=((60, 6), (40, 4)))
    six = StateName("a", 6)
    assert chosen([ahead, behind], "pinned", "state") == (six, 60)
    assert chosen([behind, ahead], 60, "state") == (six, 60)
    assert chosen([_offer(6, pins=((60, 6),)), behind], "latest", "state") == (six, 60)
    with pytest.raises(UsageError, match="step 80 is not pinned in all ranks; pinned in all: 60"):
        chosen([ahead, behind], 80, "state")
    with pytest.raises(UsageError, match="pinned in all: none"):
        chosen([ahead, _offer(7)], "pinned", "state")


def test_nothing_in_common() -> None:
    """No rank has anything that counts: a new training. Some have: an error, never a mix."""
    assert chosen([_offer(), _offer()], "latest", "state") is None
    assert chosen([replace(_offer(5), only_tentative=True), _offer()], "latest", "s") is None
    with pytest.raises(DataMismatchError, match="no generation in common"):
        chosen([_offer(5, 4), _offer()], "latest", "state")
