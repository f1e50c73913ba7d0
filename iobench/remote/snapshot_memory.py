"""SnapshotMemory: the memory tiers of a Checkpointer, what waits in them, and loads from them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from iobench.checkpoint.any_format import read_any
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.ranked.messages import Committed, Turns
from iobench.checkpoint.restore import Loaded
from iobench.checkpoint.retention import Retention, abandoned_first, in_save_order
from iobench.checkpoint.save import Copy, Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import DataMismatchError, TransferError
from iobench.ranks.world import World
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory_pool import MemoryPool
from iobench.remote.memory_reader import MemoryReader
from iobench.remote.memory_slot import Kept, MemorySlot
from iobench.remote.memory_status import MemoryStatusFile
from iobench.remote.memory_tier import MemoryTier
from iobench.writers.blocks.channel import Lease
from iobench.writers.image import Bytes, FileImage

__all__ = ["SnapshotMemory", "TierUse", "next_to_write"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """A memory tier now, in bytes.

    `used_bytes` are snapshots that are not written yet. `free_bytes` can take more of them, by its
    size and all limits. `rate_bytes_per_s` is that of a copy by one thread, measured at the start,
    of memory with a `node` or `path`.
    """

    tier: str
    size_bytes: int
    used_bytes: int
    free_bytes: int
    rate_bytes_per_s: float | None


def next_to_write(waiting: Sequence[Mapping[str, int]], free_shares: Mapping[str, float]) -> int:
    """Return the position of the snapshot to write next. A pure function.

    `waiting` has the bytes of each snapshot by tier, oldest snapshot first. `free_shares` has the
    free share of each tier, the fastest tier first. Of the snapshots with the most bytes in the
    tier with the least free share it is the newest one; of tiers with equal shares the fastest one
    counts.
    """
    for tier in sorted(free_shares, key=lambda name: free_shares[name]):  # a stable sort
        held = [parts.get(tier, 0) for parts in waiting]
        if most := max(held):
            return len(held) - 1 - held[::-1].index(most)
    return len(waiting) - 1


class SnapshotMemory:
    """Wires memory tiers to the Checkpointer of one rank of `world`. `open` comes first.

    Every snapshot waits in memory until it is written, or until retention would not keep it.
    `tiers` have the share of this rank of its node's memory. Raises OptionError or UnavailableError
    for memory that cannot be had here.
    """

    def __init__(self, tiers: Sequence[MemoryTier], world: World) -> None:
        self._rates = {one.name: one.probe() if one.is_special else None for one in tiers}
        self._ranks = world.size
        self.pool = MemoryPool(tiers, sharers=world.local_size, alone=world.size == 1)
        self._damaged = ""

    def open(
        self,
        persist: Callable[[Snapshot[T]], Committed],
        *,
        ledger: Ledger | None,
        keep: Retention,
        store: CheckpointStore,
        local: LocalTier | None,
        stored: Callable[[Save], list[Copy]] | None,
        in_order: bool,
        turns: Turns | None = None,
    ) -> Persister[T]:
        """Return the persister. `ledger` and `local` are those of rank 0; `keep` is the user's.

        `local` is the store if it drains. `stored` returns where the copies of a committed save
        are; None without a remote tier.
        """
        self._ledger, self._keep, self._store, self._local = ledger, keep, store, local
        self._stored = stored
        if ledger is not None and isinstance(store, DirectoryStore):
            self.pool.status = MemoryStatusFile(
                self.pool, store.directory, self._rates, ranks=self._ranks
            )

        def kept(snapshot: Snapshot[T]) -> None:
            found = persist(snapshot)
            if isinstance(snapshot.slot, MemorySlot):
                snapshot.slot.kept = _kept(snapshot, found)

        return Persister(self.pool, kept, pick=None if in_order else self._pick, turns=turns)

    def _pick(self, waiting: list[Lease[Snapshot[T]]]) -> list[Lease[Snapshot[T]]]:
        """Write the newest snapshot of those that occupy the scarcest memory next.

        One that retention would remove at once, as newer ones wait or are durable, is dropped.
        """
        assert self._ledger is not None  # this is rank 0
        saves = [lease.item.save for lease in waiting]
        try:
            wanted = self._wanted(
                {save.step: (self._ledger.serial_of(save), save.created_s) for save in saves}
            )
        except TransferError:  # the manifests cannot be read: the commit of this one tells it
            return [waiting[-1], *waiting[:-1]]
        wanted.add(saves[-1].step)
        stay = [lease for lease in waiting if lease.item.save.step in wanted]
        free = {tier: idle / max(1, used + idle) for tier, (used, idle) in self.pool.fill().items()}
        chosen = stay[next_to_write([_bytes_by_tier(one) for one in stay], free)]
        return [chosen, *(one for one in stay if one is not chosen)]

    def _wanted(self, waiting: Mapping[int, tuple[int, float]]) -> set[int]:
        """Return the steps that the local or remote tier would keep.

        `waiting` has serial numbers and times by step.
        """
        assert self._ledger is not None  # this is rank 0
        wanted = self._ledger.would_keep(waiting, self._keep)
        if self._local is not None:
            wanted |= self._local.remote.may_keep(waiting)
        return wanted

    def began(self, save: Save) -> None:
        """Number a save: it may be written after later ones. A bucket is not asked here."""
        save.tiers = self.copies
        if self._ledger is not None:
            save.serial = self._ledger.claim_serial()

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first, as far as this rank knows."""
        slots = (one for one in self.pool.slots() if one.save is save and (one.busy or one.kept))
        memory = [Copy(tier=one.tiers, state="volatile") for one in slots][:1]
        if save.status != "committed":
            return memory
        if self._stored is not None:
            return [*memory, *self._stored(save)]
        durable = self._is_stored(save)
        return [*memory, *([Copy(tier=str(self._store), state="durable")] if durable else [])]

    def _is_stored(self, save: Save) -> bool:
        if self._ledger is not None:
            return self._ledger.serials().get(save.step) == save.serial
        if isinstance(self._store, DirectoryStore):
            return os.path.exists(self._store.locate(save.step))
        return True  # a bucket is not asked

    def use(self) -> tuple[TierUse, ...]:
        """Return the use of this rank's share of each tier now, fastest first."""
        fill = self.pool.fill()
        return tuple(
            TierUse(
                tier=one.name,
                size_bytes=one.size_bytes,
                used_bytes=fill[one.name][0],
                free_bytes=fill[one.name][1],
                rate_bytes_per_s=self._rates[one.name],
            )
            for one in self.pool.tiers
        )

    def kept(self, step: int, serial: int) -> MemorySlot | None:
        """Return the slot with the bytes of this committed checkpoint, if memory still has it."""
        for slot in self.pool.slots():
            kept = slot.kept
            if kept and (kept.step, kept.serial) == (step, serial):
                return slot
        return None

    def restore(self, step: int | Literal["latest"], like: Any) -> tuple[Any, Loaded] | None:
        """Return the state of a checkpoint from memory, and how it was restored.

        None if memory does not have this checkpoint. Every byte is compared with its checksum: when
        they differ, it is dropped with a RuntimeWarning, and None is returned; see `told`. Raises
        StateMismatchError. The persister is idle.
        """
        self._damaged = ""
        slot = self._slot(step)
        if slot is None or slot.kept is None or slot.kept.manifest is None:
            return None
        manifest = slot.kept.manifest
        where = f"{self._store}: step {manifest.step}"
        copy = MemoryReader(slot.kept.files(slot.memory), self._store.locate(manifest.step))
        try:
            state, transfer = read_any(copy, where, manifest, like)
        except DataMismatchError as error:
            self._damaged, slot.kept = f"{slot.tiers}: {error}", None
            warnings.warn(
                f"step {manifest.step} is not read from memory: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        sources = {slot.tiers: "read"}
        return state, Loaded(step=manifest.step, transfer=transfer, passed_over={}, sources=sources)

    def told(self, loaded: Loaded) -> Loaded:
        """Return `loaded`, a restore from other tiers, with its sources and why not from memory."""
        sources = loaded.sources or {str(self._store): "read"}
        if self._damaged:
            tier, _, why = self._damaged.partition(": ")
            sources = {tier: why, **sources}
        return replace(loaded, sources=sources)

    def _slot(self, step: int | Literal["latest"]) -> MemorySlot | None:
        assert self._ledger is not None  # there is one process
        known = self._ledger.serials()
        if self._local is not None:  # saves that went to the remote tier directly
            known |= {one.step: one.serial for one in self._local.drain.queue.entries()}
        if step == "latest":
            order = abandoned_first(in_save_order(known))
            if not order:
                return None
            step = order[-1]
        return self.kept(step, known[step]) if step in known else None

    def forget(self, step: int) -> None:
        """Drop the bytes of a checkpoint that was removed."""
        for slot in self.pool.slots():
            if slot.kept is not None and slot.kept.step == step:
                slot.kept = None


def _bytes_by_tier(lease: Lease[Snapshot[Any]]) -> dict[str, int]:
    """Return the bytes of a snapshot in each tier; a save that failed in this rank has none."""
    slot = lease.item.slot
    return slot.bytes_by_tier() if isinstance(slot, MemorySlot) else {}


def _kept(snapshot: Snapshot[Any], found: Committed) -> Kept:
    """Return what the slot has of the checkpoint: all of its files, or the file of this rank."""
    content = snapshot.content
    if found.manifest is not None:
        return Kept(
            step=snapshot.save.step,
            serial=found.serial,
            manifest=found.manifest,
            files=lambda memory: [content.image_in(memory), content.skeleton_image()],
        )
    path, size = found.file.path, content.size_bytes
    end = [bytes(view) for view in found.file.views(size, found.file.size_bytes)]

    def files(memory: Bytes) -> list[FileImage]:
        return [FileImage.of(path, [memory[:size], *end])]

    return Kept(step=snapshot.save.step, serial=found.serial, files=files)
