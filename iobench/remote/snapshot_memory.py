"""SnapshotMemory: the memory tiers of a Checkpointer, what waits in them, and loads from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from iobench.checkpoint.copies import Copy
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.load.any_format import read_any
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import abandoned_first, in_save_order
from iobench.checkpoint.persister import Snapshot
from iobench.checkpoint.restore import Loaded
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import DataMismatchError
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory_persister import MemoryPersister
from iobench.remote.memory_pool import MemoryPool
from iobench.remote.memory_reader import MemoryReader
from iobench.remote.memory_slot import Kept, MemorySlot
from iobench.remote.memory_status import MemoryStatusFile
from iobench.remote.memory_tier import MemoryTier
from iobench.writers.image import Bytes, FileImage

__all__ = ["SnapshotMemory", "TierUse", "uses"]


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


def uses(pool: MemoryPool, rates: Mapping[str, float | None]) -> tuple[TierUse, ...]:
    """Return the use of each tier of `pool` now, fastest first. `rates` were measured before."""
    fill = pool.fill()
    return tuple(
        TierUse(
            tier=one.name,
            size_bytes=one.size_bytes,
            used_bytes=fill[one.name][0],
            free_bytes=fill[one.name][1],
            rate_bytes_per_s=rates[one.name],
        )
        for one in pool.tiers
    )


def _kept(manifest: Manifest, content: Serialized) -> Kept:
    def files(memory: Bytes) -> list[FileImage]:
        return [content.image_in(memory), content.skeleton_image()]

    return Kept(step=manifest.step, serial=manifest.serial, manifest=manifest, files=files)


class SnapshotMemory:
    """Wires memory tiers to a Checkpointer. `open` comes first.

    Raises OptionError or UnavailableError for memory that cannot be had here.
    """

    def __init__(self, tiers: Sequence[MemoryTier]) -> None:
        self.rates = {one.name: one.probe() if one.is_special else None for one in tiers}
        self.pool = MemoryPool(tiers)
        self._damaged = ""

    def open(
        self,
        persist: Callable[[Snapshot[Serialized]], Manifest],
        *,
        ledger: Ledger,
        keep: Retention,
        store: CheckpointStore,
        local: LocalTier | None,
        in_order: bool,
    ) -> MemoryPersister[Serialized]:
        """Return the persister. `keep` is the user's; `local` is the store if it drains."""
        self._ledger, self._keep, self._store, self._local = ledger, keep, store, local
        status = None
        if isinstance(store, DirectoryStore):
            status = MemoryStatusFile(self.pool, store.directory, self.rates)

        def kept(snapshot: Snapshot[Serialized]) -> Kept:
            return _kept(persist(snapshot), snapshot.content)

        self._persister = MemoryPersister(
            self.pool,
            kept,
            self._wanted,
            ledger.serial_of,
            in_order=in_order,
            status=status,
        )
        return self._persister

    def _wanted(self, waiting: Mapping[int, tuple[int, float]]) -> set[int]:
        """Return the steps that the local or remote tier would keep."""
        wanted = self._ledger.would_keep(waiting, self._keep)
        if self._local is not None:
            wanted |= self._local.remote.may_keep(waiting)
        return wanted

    def began(self, save: Save) -> None:
        """Number a save: it may be written after later ones. A bucket is not asked here."""
        save.serial, save.tiers = self._ledger.claim_serial(), self.copies

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first."""
        tiers = self._persister.tiers_of(save)
        memory = [Copy(tier=tiers, state="volatile")] if tiers else []
        if save.status != "committed":
            return memory
        if self._local is not None:
            return [*memory, *self._local.copies(save)]
        durable = self._ledger.serials().get(save.step) == save.serial
        return [*memory, *([Copy(tier=str(self._store), state="durable")] if durable else [])]

    def use(self) -> tuple[TierUse, ...]:
        """Return the use of each tier now, fastest first."""
        return uses(self.pool, self.rates)

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
        return Loaded(
            step=loaded.step,
            transfer=loaded.transfer,
            passed_over=loaded.passed_over,
            sources=sources,
        )

    def _slot(self, step: int | Literal["latest"]) -> MemorySlot | None:
        known = self._ledger.serials()
        if self._local is not None:  # saves that went to the remote tier directly
            known |= {one.step: one.serial for one in self._local.drain.queue.entries()}
        if step == "latest":
            order = abandoned_first(in_save_order(known))
            if not order:
                return None
            step = order[-1]
        return self._persister.kept(step, known[step]) if step in known else None

    def forget(self, step: int) -> None:
        """Drop the bytes of a checkpoint that was removed."""
        for slot in self.pool.slots():
            if slot.kept is not None and slot.kept.step == step:
                slot.kept = None
