"""A signal handler that saves, or another thread, changes what a save looks through."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from support.reentry import at_every_collection, everywhere

from iobench.checkpoint import ledger as ledger_file
from iobench.checkpoint import save as saves
from iobench.checkpoint import slots
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.ranked.messages import Turns
from iobench.checkpoint.retention import KeepAll, KeepLast
from iobench.checkpoint.save import Save, SaveEvents
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.checkpoint.store import CheckpointStore
from iobench.ranks.control import Control
from iobench.remote import journal, memory, placement, queue
from iobench.remote.journal import DrainEvent, DrainJournal
from iobench.remote.memory import Memory, MemoryPool, MemoryTier
from iobench.remote.placement import TierHistory
from iobench.remote.queue import DrainQueue, Queued
from iobench.units import MIB
from iobench.writers.blocks.channel import Lease

_Calls = tuple[Callable[[], object], Callable[[], object]]


@pytest.mark.slow
@pytest.mark.parametrize("module", [slots, memory])
def test_slots(module: ModuleType) -> None:
    """Both saves get a slot, and both slots are counted; also those of memory tiers, which are made
    when a save needs them."""
    size = 4096 if module is slots else MIB

    def check(enter: Callable[..., bool]) -> bool:
        pool: SlotPool | MemoryPool = SlotPool(1, MIB, streams=True)
        if module is memory:
            pool = MemoryPool([MemoryTier(Memory("4MiB"))])
        got = list[Slot]()
        pool.grow(size)
        there = enter(*[lambda: got.append(pool.take(pinned=False))] * 2)
        assert len({id(slot) for slot in got}) == len(got) == 1 + there
        assert pool.size_bytes == size * len(got)
        return there

    everywhere(module, check)


def test_remembered_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save that is watched makes room for itself."""
    monkeypatch.setattr(saves, "_REMEMBERED", 3)

    def check(enter: Callable[..., bool]) -> bool:
        events = SaveEvents(lambda *_: None)
        new = [Save(step=step, status="copying", created_s=0.0) for step in range(5)]
        for save in new[:3]:
            events.watch(save)
        there = enter(lambda: events.watch(new[3]), lambda: events.watch(new[4]))
        assert new[3].step in events._saves
        assert not there or new[4].step in events._saves
        events.end()
        return there

    everywhere(saves, check)


def test_states_of_copies() -> None:
    """A save is queued while the queue is looked through."""

    def entry(step: int) -> Queued:
        return Queued(step=step, serial=step, since_s=0.0, created_s=0.0)

    def check(enter: Callable[..., bool]) -> bool:
        waiting = DrainQueue()
        for step in range(3):
            waiting.put(entry(step))

        def look() -> None:
            assert {0, 1, 2} <= {one.step for one in waiting.not_durable()} <= {0, 1, 2, 3}
            assert waiting.unsettled([1, 4]) == {1, 4}

        return enter(look, lambda: waiting.put(entry(3)))

    everywhere(queue, check)


def test_observed_rates() -> None:
    """A handler that saves adds its rate, and waits for nothing."""

    def check(enter: Callable[..., bool]) -> bool:
        rates = TierHistory()
        there = enter(
            lambda: rates.add(placement.LOCAL, 10, 1.0), lambda: rates.add(placement.LOCAL, 20, 1.0)
        )
        sizes = [one.size_bytes for one in rates.seen[placement.LOCAL]]
        assert sorted(sizes) == ([10, 20] if there else [10])
        return there

    everywhere(placement, check)


def test_journal(tmp_path: Path) -> None:
    """Both events are whole lines."""

    def check(enter: Callable[..., bool]) -> bool:
        (tmp_path / journal.JOURNAL).unlink(missing_ok=True)
        kept = DrainJournal(tmp_path)
        event = DrainEvent(event="saved", at_s=time.time())
        there = enter(lambda: kept.add(event), lambda: kept.add(event))
        events, damaged = kept.read()
        assert (len(events), damaged) == (1 + there, 0)
        return there

    everywhere(journal, check)


class _Store:
    """A store of some checkpoints, none of which was read."""

    def __init__(self, count: int) -> None:
        self.count, self.readers = count, 16 if count else 1

    def steps(self) -> list[int]:
        return list(range(self.count))

    def serials(self) -> dict[int, int]:
        return {step: step + 1 for step in self.steps()}

    def remove(self, step: int) -> None: ...


def test_ledger() -> None:
    """A manifest has been read in another thread while those that were not read are chosen."""

    def check() -> _Calls:
        ledger = Ledger(cast(CheckpointStore, _Store(50)), KeepAll())
        return lambda: ledger._read(lambda _: False), lambda: ledger._unread.discard(9)

    at_every_collection(check)


def test_ledger_of_a_handler() -> None:
    """It commits a checkpoint, and older ones are removed."""

    def save(step: int) -> Save:
        return Save(step=step, status="committed", created_s=float(step))

    def check(enter: Callable[..., bool]) -> bool:
        ledger = Ledger(cast(CheckpointStore, _Store(0)), KeepLast(2))
        for step in range(3):
            ledger.committed(save(step), step + 1)

        def look() -> None:
            assert 2 in ledger.serials()
            ledger.ages()
            ledger.tidy()
            ledger.claim(save(5))
            ledger.resumed_from(1)

        there = enter(look, lambda: ledger.committed(save(9), 10))
        assert ledger.holds(9) == there
        return there

    everywhere(ledger_file, check)


def test_snapshots_that_wait() -> None:
    """One is dropped in another thread while the next one is remembered."""
    ranks = cast(Control, SimpleNamespace(leads=False))

    def lease(number: int) -> Lease[Any]:
        return Lease(SimpleNamespace(number=number))

    def check() -> _Calls:
        turns = Turns(ranks, lambda: pytest.fail("nothing is announced"))
        for number in range(50):
            turns.remember(lease(number))
        return lambda: turns.remember(lease(99)), lambda: turns.drop(9)

    at_every_collection(check)
