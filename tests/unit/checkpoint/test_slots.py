"""Slots: memory that is taken, reused and given back."""

from __future__ import annotations

import weakref

import pytest

from iobench.checkpoint import slots
from iobench.checkpoint.slots import Slot
from iobench.units import MIB
from iobench.writers.image import Bytes


def test_memory_is_given_back() -> None:
    """Nothing holds the mapping after `free`."""
    slot = Slot()
    slot.hold(4 * MIB, pinned=False)
    owner = weakref.ref(_owner(slot))
    slot.free()
    assert owner() is None
    assert len(slot.memory) == 0


def test_memory_that_grows_is_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old mapping is gone when the new one is made."""
    slot = Slot()
    slot.hold(4 * MIB, pinned=False)
    owner = weakref.ref(_owner(slot))
    mapped, held = slots._map, []

    def note(size_bytes: int) -> Bytes:
        held.append(owner())
        return mapped(size_bytes)

    monkeypatch.setattr(slots, "_map", note)
    slot.hold(5 * MIB, pinned=False)
    assert held == [None]


def _owner(slot: Slot) -> object:
    """The mapping, or the array over it that all views have as their base."""
    base = slot.memory.base
    assert base is not None
    return base
