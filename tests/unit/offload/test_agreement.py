"""What ranks choose together: the newest state that all have, whatever a crash has left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import DataMismatchError, UsageError
from iobench.offload.agreement import GenerationOffer, chosen, kept_records
from iobench.offload.record import ROW, GenerationRecord, Pin


def _record(sequence: int, updates: int, pins: tuple[Pin, ...] = ()) -> GenerationRecord:
    return GenerationRecord(
        sequence=sequence,
        generation=sequence,
        updates=updates,
        rows=np.zeros(1, dtype=ROW),
        counts=np.zeros(1, dtype=np.uint64),
        groups=[{}],
        pins=pins,
    )


def test_an_abandoned_generation_is_not_offered() -> None:
    """A training that went back from 6 to 5 updates has abandoned 6; damaged records do not count."""
    again = replace(_record(8, 5), generation=5)
    records = [again, _record(6, 6), _record(5, 5), _record(4, 4)]
    assert [one.updates for one in kept_records(records)] == [5, 4]
    assert [one.updates for one in kept_records([_record(9, 6), *records])] == [6, 5, 4]
    damaged = [replace(again, damaged=True), _record(4, 4)]
    assert [one.updates for one in kept_records(damaged)] == [4]


def _offer(*updates: int, pins: tuple[tuple[int, int], ...] = ()) -> GenerationOffer:
    return GenerationOffer(updates=updates, pins=pins)


def test_offers_of_records() -> None:
    """The newest first; a pin of an abandoned generation is not offered. JSON gives it back."""
    pins = (Pin(4, 40, None), Pin(6, 60, None))
    offer = GenerationOffer.of([_record(9, 5, pins), _record(6, 6), _record(4, 4)])
    assert offer == _offer(5, 4, pins=((40, 4),))
    assert GenerationOffer.from_json(offer.to_json()) == offer
    assert GenerationOffer.of([]) == _offer()


@given(ranks=st.integers(1, 5), last=st.integers(1, 9), ahead=st.sets(st.integers(0, 4)))
def test_a_crash_leaves_a_common_step(ranks: int, last: int, ahead: set[int]) -> None:
    """Whoever has committed the next step: all have the step before, and it is the one chosen."""
    offers = [_offer(last + 1, last) if rank in ahead else _offer(last) for rank in range(ranks)]
    everyone = ahead >= set(range(ranks))
    assert chosen(offers, "latest", "state") == (last + 1 if everyone else last, None)


def test_pins_that_all_ranks_have() -> None:
    """By step and updates; the newest of them, or the wanted one."""
    ahead = _offer(8, 7, pins=((80, 8), (60, 6)))
    behind = _offer(7, 6, pins=((60, 6), (40, 4)))
    assert chosen([ahead, behind], "pinned", "state") == (6, 60)
    assert chosen([behind, ahead], 60, "state") == (6, 60)
    assert chosen([_offer(6, pins=((60, 6),)), behind], "latest", "state") == (6, 60)
    with pytest.raises(UsageError, match="step 80 is not pinned in all ranks; pinned in all: 60"):
        chosen([ahead, behind], 80, "state")
    with pytest.raises(UsageError, match="pinned in all: none"):
        chosen([ahead, _offer(7)], "pinned", "state")


def test_nothing_in_common() -> None:
    """No rank has anything: a new training. Some have: an error, never a mix."""
    assert chosen([_offer(), _offer()], "latest", "state") is None
    with pytest.raises(DataMismatchError, match="no generation in common"):
        chosen([_offer(5, 4), _offer()], "latest", "state")
