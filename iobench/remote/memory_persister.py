"""MemoryPersister: writes snapshots from memory tiers, the scarcest memory first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.save import Save
from iobench.errors import StateError, TransferError
from iobench.remote.memory_pool import MemoryPool
from iobench.remote.memory_slot import Kept, MemorySlot
from iobench.remote.memory_status import MemoryStatusFile
from iobench.remote.spill import next_to_write
from iobench.writers.blocks.channel import Lease, OnFull

__all__ = ["MemoryPersister"]

T = TypeVar("T")

_Wanted = Callable[[Mapping[int, tuple[int, float]]], set[int]]
"""Gets serial numbers and times by step; returns the steps that retention would keep."""


class MemoryPersister(Persister[T]):
    """Every snapshot waits in memory until it is written, or until retention would not keep it.

    Next is the newest snapshot of those that occupy the scarcest memory, see `spill`. A snapshot
    that retention would remove at once, as newer ones wait or are durable, is superseded.
    `persist` returns what the slot has of the checkpoint; None: nothing was written.
    """

    _waits_for_room = True
    """Whether a snapshot that finds no memory waits until all others are written."""

    def __init__(
        self,
        pool: MemoryPool,
        persist: Callable[[Snapshot[T]], Kept | None],
        wanted: _Wanted,
        serial_of: Callable[[Save], int],
        *,
        in_order: bool = False,
        status: MemoryStatusFile | None = None,
    ) -> None:
        super().__init__(pool, self._keeping, in_order=in_order)
        self._status = status
        self._memory, self._commit = pool, persist
        self._wanted, self._serial_of = wanted, serial_of

    def _keeping(self, snapshot: Snapshot[T]) -> None:
        kept = self._commit(snapshot)
        if isinstance(snapshot.slot, MemorySlot):
            snapshot.slot.kept = kept

    def _choose(self, waiting: list[Lease[Snapshot[T]]]) -> list[Lease[Snapshot[T]]]:
        saves = [lease.item.save for lease in waiting]
        try:
            wanted = self._wanted(
                {save.step: (self._serial_of(save), save.created_s) for save in saves}
            )
        except TransferError:  # the manifests cannot be read: the commit of this one tells it
            return [waiting[-1], *waiting[:-1]]
        wanted.add(saves[-1].step)
        stay = [lease for lease in waiting if lease.item.save.step in wanted]
        chosen = stay[next_to_write([_bytes_by_tier(one) for one in stay], self._free_shares())]
        return [chosen, *(one for one in stay if one is not chosen)]

    def _free_shares(self) -> dict[str, float]:
        fill = self._memory.fill()
        return {tier: free / max(1, used + free) for tier, (used, free) in fill.items()}

    def take(self, lease: Lease[Snapshot[T]], *, pinned: bool, on_full: OnFull = "wait") -> bool:
        try:
            taken = super().take(lease, pinned=pinned, on_full=on_full)
        except StateError:
            if not self._waits_for_room or not any(slot.busy for slot in self._memory.slots()):
                raise
            # It has a permit, but the memory of one smaller snapshot is not enough, or the system
            # gives less than was counted: wait for all snapshots, and use their memory.
            self.wait()
            lease.item.slot, taken = self._memory.take(pinned=pinned), True
        if taken:
            _slot(lease).save = lease.item.save
        return taken

    def free(self) -> None:
        super().free()
        self._memory.close()
        if self._status is not None:
            self._status.close()

    def submit(self, lease: Lease[Snapshot[T]]) -> None:
        super().submit(lease)
        self._changed()

    def _release(self, snapshot: Snapshot[T]) -> None:
        super()._release(snapshot)
        self._changed()

    def _changed(self) -> None:
        if self._status is not None:
            self._status.update()

    def kept(self, step: int, serial: int) -> MemorySlot | None:
        """Return the slot with the bytes of this committed checkpoint, if memory still has it."""
        for slot in self._memory.slots():
            kept = slot.kept
            if kept and (kept.step, kept.serial) == (step, serial):
                return slot
        return None

    def tiers_of(self, save: Save) -> str | None:
        """Return the memory tiers that have the bytes of `save`; None if none has them."""
        for slot in self._memory.slots():
            if slot.save is save and (slot.busy or slot.kept is not None):
                return slot.tiers
        return None


def _slot(lease: Lease[Snapshot[T]]) -> MemorySlot:
    slot = lease.item.slot
    assert isinstance(slot, MemorySlot)
    return slot


def _bytes_by_tier(lease: Lease[Snapshot[T]]) -> dict[str, int]:
    """Return the bytes of a snapshot in each tier; a save that failed in this rank has none."""
    slot = lease.item.slot
    return slot.bytes_by_tier() if isinstance(slot, MemorySlot) else {}
