"""MemoryPool: the slots of a Checkpointer with memory tiers. Each is made when a save needs it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from iobench import linux
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.environment.memory import available_bytes
from iobench.errors import StateError
from iobench.remote.memory import MemoryTier
from iobench.units import GIB, format_size
from iobench.writers.image import Bytes, FileImage

_MOST_SLOTS = 512
"""Each is one or more mappings, of which a process has a limited number."""
_SPARE_PART, _MOST_SPARE = 8, GIB
"""An eighth of the memory that is available at the start, 1 GiB at most, is left to others."""


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """A memory tier now, in bytes.

    `used_bytes` are snapshots that are not written yet. `free_bytes` can take more of them, by its
    size and all limits.
    """

    tier: str
    size_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A committed checkpoint whose bytes are in a slot, until another snapshot takes it.

    `files` gets the memory of the slot, and returns what it has of the checkpoint. `manifest` is
    that of a checkpoint of one process.
    """

    step: int
    serial: int
    files: Callable[[Bytes], list[FileImage]]
    manifest: Manifest | None = None


class MemorySlot(Slot):
    """A slot in the memory tier of this name.

    `save` is the save that took it last. `kept` is set once this save is committed. `lazy`: its
    pages are made at the first access.
    """

    def __init__(self, number: int, memory: Bytes, tier: str, *, lazy: bool) -> None:
        super().__init__()
        self._use(memory)
        self.number, self.tier = number, tier
        self.busy, self._lazy = False, lazy
        self.save: Save | None = None
        self.kept: Kept | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes without pages; pages are made from the begin to the end."""
        last = self.memory.ctypes.data + len(self.memory) - 1
        return len(self.memory) if self._lazy and not linux.has_page(last) else 0

    def free(self) -> None:
        self.kept, self.save = None, None
        super().free()

    def __lt__(self, other: Any) -> bool:
        """Slots that were made first are in the faster memory."""
        return bool(self.number < other.number)


class MemoryPool(SlotPool):
    """As many slots as the memory tiers hold. A slot is in the first tier with room for it.

    Before a slot is made, the free bytes of control groups, the system, tmpfs, huge pages and the
    node are counted. A tier without room is left out, so a limit that is lowered means fewer new
    slots. `count` is how many there are and could be now, 512 at most. No lock, for the reasons of
    SlotPool: what is taken is counted in the slots that exist. Of `sharers` processes of this node
    each takes an equal share of the available memory at most.
    """

    def __init__(
        self, tiers: Sequence[MemoryTier], *, sharers: int = 1, alone: bool = True
    ) -> None:
        """With `alone`, `grow` counts the slots; otherwise `count` stays until `counted`."""
        super().__init__(1)
        self.counts_alone = alone
        self._free.clear()
        self.tiers, self._sharers = list(tiers), sharers
        self._unit = max(linux.PAGE, *(tier.unit for tier in tiers))
        self._spare = min((available_bytes() or 0) // _SPARE_PART, _MOST_SPARE)
        self._numbers = itertools.count()
        self._counted = 0

    def slots(self) -> list[MemorySlot]:
        """Return the slots that have memory, those that were made first first. In any thread."""
        return sorted(slot for slot in cast(list[MemorySlot], self._existing()) if len(slot.memory))

    @property
    def size_bytes(self) -> int:
        return sum(len(slot.memory) for slot in self.slots())

    def counted(self, size_bytes: int) -> int:
        """Return how many slots of `size_bytes` there are or could be, 512 at most.

        If a slot is free, that is the last count. Raises StateError when there is no room for a
        single one.
        """
        size_bytes = max(size_bytes, 1)
        if size_bytes > self._size or not self._free:
            if size_bytes > self._size:
                self._size = -(-size_bytes // self._unit) * self._unit
                self.free()  # they are too small
            more = sum(room // self._size for room in self._rooms())
            self._counted = min(_MOST_SLOTS, len(self.slots()) + more)
            if not self._counted:
                raise StateError(self.too_large())
        return self._counted

    @property
    def frees_more(self) -> bool:
        return any(slot.busy for slot in self.slots())

    def too_large(self) -> str:
        """Return the sizes of a snapshot and of the tiers, for an error."""
        tiers = ", ".join(
            f"{format_size(tier.size_bytes)} of {tier.name} ({format_size(room)} available)"
            for tier, room in zip(self.tiers, self._rooms(), strict=True)
        )
        return (
            f"a snapshot of {format_size(self._size)} does not fit the memory tiers: {tiers}; use "
            "larger tiers, or save() in place of save_async()"
        )

    def _rooms(self) -> list[int]:
        """Return the bytes that each tier has left for new slots."""
        taken, missing = dict[str, int](), dict[str, int]()
        for slot in self.slots():
            taken[slot.tier] = taken.get(slot.tier, 0) + len(slot.memory)
            missing[slot.tier] = missing.get(slot.tier, 0) + slot.missing_bytes
        left = available_bytes()
        if left is not None:
            left = (left - self._spare) // self._sharers
            left -= sum(missing.get(one.name, 0) for one in self.tiers if one.shared)
        rooms = []
        for tier in self.tiers:
            room = tier.room_bytes(taken.get(tier.name, 0), missing.get(tier.name, 0))
            if tier.shared and left is not None:
                room = min(room, max(0, left))
                left -= room - room % (self._size or 1)
            rooms.append(room)
        return rooms

    def _new(self) -> MemorySlot | None:
        """Return a new slot in the first tier with room for it; None without one."""
        for tier, room in zip(self.tiers, self._rooms(), strict=True):
            if room >= self._size and (memory := tier.new(self._size)) is not None:
                slot = MemorySlot(next(self._numbers), memory, tier.name, lazy=tier.lazy)
                return self._noted(slot)
        return None

    def allocated(self) -> list[Slot]:
        """Make all slots that there is room for, and return the free ones."""
        for _ in range(self.count - len(self.slots())):
            if (slot := self._new()) is None:
                break
            self._free.append(slot)
        return list(self._free)

    def take(self, *, pinned: bool, save: Save | None = None) -> Slot:
        """Return a free slot in the fastest memory, for `save`; its content is undefined.

        Raises StateError when there is no memory left for one more slot.
        """
        slot = self._fastest() or self._new()
        if slot is None:
            raise StateError(self.too_large())
        slot.busy, slot.save, slot.kept = True, save, None
        try:
            slot.hold(self._size, pinned=pinned)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def _fastest(self) -> MemorySlot | None:
        for slot in self.slots():
            with contextlib.suppress(ValueError):  # taken: deque.remove is atomic
                self._free.remove(slot)
                if len(slot.memory) >= self._size:
                    return slot
                slot.free()  # given back while the size grew
        return None

    def give(self, slot: Slot) -> None:
        assert isinstance(slot, MemorySlot)
        slot.busy = False
        if len(slot.memory) < self._size:
            slot.free()
        else:
            self._free.append(slot)

    def free(self) -> None:
        """Free the memory of the free slots."""
        while self._free:
            with contextlib.suppress(IndexError):
                self._free.pop().free()

    def use(self) -> tuple[TierUse, ...]:
        """Return the use of each tier now, fastest first."""
        return tuple(
            TierUse(
                tier=tier.name,
                size_bytes=tier.size_bytes,
                used_bytes=self._bytes(tier, lambda one: one.busy and one.kept is None),
                free_bytes=room
                - room % (self._size or tier.unit)
                + self._bytes(tier, lambda one: not one.busy),
            )
            for tier, room in zip(self.tiers, self._rooms(), strict=True)
        )

    def _bytes(self, tier: MemoryTier, which: Callable[[MemorySlot], bool]) -> int:
        return sum(len(one.memory) for one in self.slots() if one.tier == tier.name and which(one))
