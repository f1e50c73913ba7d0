"""RankMemory: the memory tiers of one rank, what waits in them, and loads from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from iobench.checkpoint.copies import Copy
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.load.candidates import Candidates
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.checkpointer.memory.persister import RankMemoryPersister
from iobench.checkpointer.memory.reader import MemoryCandidates
from iobench.checkpointer.saves.committer import RankCommitter
from iobench.ranks.control import Control
from iobench.ranks.world import World
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory_pool import MemoryPool
from iobench.remote.memory_status import MemoryStatusFile
from iobench.remote.memory_tier import MemoryTier
from iobench.remote.snapshot_memory import TierUse, uses
from iobench.replicas.recovery import Version

__all__ = ["RankMemory"]

Copies = Callable[[Save], list[Copy]]


class RankMemory:
    """Wires memory tiers to the Checkpointer of one rank. `open` comes first.

    `tiers` have the share of this rank of its node's memory. Raises OptionError or UnavailableError
    for memory that cannot be had here.
    """

    def __init__(self, tiers: Sequence[MemoryTier], world: World) -> None:
        self._rates = {one.name: one.probe() if one.is_special else None for one in tiers}
        self._world = world
        self.pool = MemoryPool(tiers, sharers=world.local_size)

    def open(
        self,
        committer: RankCommitter,
        *,
        control: Control,
        deadline_s: float,
        in_order: bool,
        keep: Retention,
        ledger: Ledger | None,
        local: LocalTier | None,
        stored: Copies | None,
    ) -> RankMemoryPersister:
        """Return the persister. `ledger` and `local` are those of rank 0; `keep` is the user's.

        `stored` returns where the copies of a committed save are; None without a remote tier.
        """
        self._ledger, self._keep, self._local, self._stored = ledger, keep, local, stored
        self._store: CheckpointStore = committer.store
        status = None
        if ledger is not None and isinstance(self._store, DirectoryStore):
            status = MemoryStatusFile(
                self.pool, self._store.directory, self._rates, ranks=self._world.size
            )
        self._persister = RankMemoryPersister(
            self.pool,
            committer,
            self._wanted,
            ledger.serial_of if ledger is not None else _none,
            control=control,
            deadline_s=deadline_s,
            in_order=in_order,
            status=status,
        )
        return self._persister

    def _wanted(self, waiting: Mapping[int, tuple[int, float]]) -> set[int]:
        """Return the steps that the local or remote tier would keep, in rank 0."""
        assert self._ledger is not None
        wanted = self._ledger.would_keep(waiting, self._keep)
        if self._local is not None:
            wanted |= self._local.remote.may_keep(waiting)
        return wanted

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first, as far as this rank knows."""
        tiers = self._persister.tiers_of(save)
        memory = [Copy(tier=tiers, state="volatile")] if tiers else []
        if save.status != "committed":
            return memory
        if self._stored is not None:
            return [*memory, *self._stored(save)]
        stored = self._is_stored(save)
        return [*memory, *([Copy(tier=str(self._store), state="durable")] if stored else [])]

    def _is_stored(self, save: Save) -> bool:
        if self._ledger is not None:
            return self._ledger.serials().get(save.step) == save.serial
        if isinstance(self._store, DirectoryStore):
            return os.path.exists(self._store.locate(save.step))
        return True  # a bucket is not asked

    def use(self) -> tuple[TierUse, ...]:
        """Return the use of this rank's share of each tier now, fastest first."""
        return uses(self.pool, self._rates)

    def forget(self, step: int) -> None:
        """Drop the bytes of a checkpoint that was removed."""
        for slot in self.pool.slots():
            if slot.kept is not None and slot.kept.step == step:
                slot.kept = None

    def candidates(
        self,
        agreed: Callable[[str, Callable[[], Any]], list[Any]],
        version: Version,
        stored: Candidates,
    ) -> MemoryCandidates | None:
        """Return `stored` with the copy of this checkpoint in memory; None if a rank has no copy.

        A call of all ranks; the arguments are the same in all of them.
        """
        slot = self._persister.kept(version.step, version.serial)
        has = agreed(f"step {version.step} in memory", lambda: slot is not None)
        if not all(has) or slot is None or slot.kept is None:
            return None

        def damaged() -> None:
            slot.kept = None

        (file,) = slot.kept.files(slot.memory)
        return MemoryCandidates(stored, version.step, file, slot.tiers, damaged)


def _none(save: Save) -> int:
    raise AssertionError(f"rank 0 numbers the saves, not this one: {save}")
