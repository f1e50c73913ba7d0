"""RankedReads: what the Checkpointer of several ranks lists and restores, from all tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.checkpointer.load.restored import FromMemory, restore_together
from iobench.ranks.control import Control
from iobench.ranks.together import T, together
from iobench.ranks.world import World
from iobench.replicas.replicator import Replicated, Replicator
from iobench.replicas.restoring import Restoring
from iobench.writers.base import Writer

if TYPE_CHECKING:
    from iobench.checkpointer.load.both_stores import BothStores
    from iobench.checkpointer.memory.reader import MemoryFirst
    from iobench.checkpointer.memory.tiers import RankMemory
    from iobench.remote.ranked.ranked_drain import RankedDrain
    from iobench.remote.remote import Remote
    from iobench.remote.snapshot_memory import TierUse
    from iobench.replicas.recovery import Version

__all__ = ["RankedReads"]


class RankedReads(Checkpointer):
    """The read side of a RankedCheckpointer. Rank 0 knows what there is, and tells the others."""

    _world: World
    _control: Control
    _replicator: Replicator | None = None
    _drain: RankedDrain | None = None
    _memory_tiers: RankMemory | None = None

    def _together(
        self, phase: str, work: Callable[[], T], tell: Callable[[T], Any] | None = None
    ) -> tuple[T, list[Any]]:
        return together(self._control, phase, work, tell, deadline_s=self._deadline_s)

    def _agreed(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        return self._together(phase, work)[1]

    def _open_tier(self, directory: Path, remote: Remote) -> CheckpointStore:
        from iobench.remote.ranked.ranked_drain import RankedDrain  # here: it takes time to import

        control = self._control.sub("drain", aside=True)
        self._drain = RankedDrain(directory, remote, control, deadline_s=self._deadline_s)
        self._tier = self._drain.tier
        return self._drain.store

    def _start_tier(self) -> None:
        drain = self._drain
        if drain is not None:
            self._agreed("drain", lambda: drain.start(lambda: self._ledger.ages()))

    def _tell_of_copies(self, on_durable: Callable[[int], None]) -> None:
        if self._drain is not None:
            self._drain.tell_of_copies(on_durable)

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        leads, both = self._world.rank == 0, self._both_stores()
        restoring = Restoring(
            world=self._world,
            together=self._together,
            store=cast(CheckpointStore, both or self._store),
            writer=both.writer if both else self._writer,
            serials=(both or self._ledger).serials if leads else None,
            replicator=self._replicator,
        )
        restoring.look(step)
        memory: list[MemoryFirst] = []
        state, loaded, version = restore_together(
            restoring,
            self._control,
            step,
            on_corrupt=on_corrupt,
            like=like,
            restore_mode=self._restore_mode,
            deadline_s=self._deadline_s,
            from_memory=self._from_memory(memory) if self._memory_tiers else None,
            **({"next_tier": both.next_tier} if both else {}),
        )

        def note() -> None:
            if leads:
                self._ledger.resumed_from(loaded.step)
                self._ledger.seen(version.serial)

        self._agreed(f"resume from step {loaded.step}", note)
        if self._replicator is not None:
            self._replicator.resumed(version)
        return state, replace(loaded, sources=self._sources(loaded, both, memory))

    def _from_memory(self, found: list[MemoryFirst]) -> FromMemory:
        """Return what finds a version in the memory tiers, and adds its reader to `found`."""

        def from_memory(
            version: Version, store: CheckpointStore, writer: Writer
        ) -> MemoryFirst | None:
            assert self._memory_tiers is not None
            where = store.locate(version.step)
            reader = self._memory_tiers.reader(
                self._agreed, version.step, version.serial, where, writer
            )
            found[:] = [reader] if reader is not None else []
            return reader

        return from_memory

    def _sources(
        self, loaded: Loaded, both: BothStores | None, memory: list[MemoryFirst]
    ) -> dict[str, str]:
        """Return where this rank has read the checkpoint; empty without tiers."""

        def stored() -> dict[str, str]:
            if both is not None:
                return both.sources(loaded.step)
            return {str(self._store): "read"} if self._memory_tiers is not None else {}

        read = memory[0] if memory and memory[0].step == loaded.step else None
        return stored() if read is None else read.sources(stored, str(self._store))

    def _both_stores(self) -> BothStores | None:
        """Return the checkpoints of both tiers, as rank 0 sees them; None without tiers."""
        if self._drain is None:
            return None

        from iobench.checkpointer.load.both_stores import BothStores, Listed

        def listed() -> list[Any] | None:
            return None if self._tier is None else self._nearest(self._tier).listed()

        found = self._agreed("list of the tiers", listed)[0]
        remote = self._drain.remote
        return BothStores(
            self._drain.store,
            self._writer,
            str(remote),
            remote.writer,
            [Listed(*one) for one in found],
        )

    def _wait_for_copies(self) -> None:
        assert self._drain is not None
        self._drain.wait(self._agreed)

    @property
    def replicas(self) -> tuple[Replicated, ...]:
        """Outcomes of the last 1,000 replications, oldest first; empty without `replicate`."""
        return () if self._replicator is None else tuple(self._replicator.replicas)

    @property
    def memory(self) -> tuple[TierUse, ...]:
        """The use of this rank's share of each memory tier now, fastest first."""
        return () if self._memory_tiers is None else self._memory_tiers.use()

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in ascending order.

        With `tiers` it is a call of all ranks: those of all tiers, as rank 0 sees them.
        """
        both = self._both_stores() if self._is_open else None
        return self._store.steps() if both is None else both.steps()

    def latest(self) -> int | None:
        """Return the step that was saved last, as rank 0 sees it; None without one.

        A call of all ranks: they get the same answer, so all of them may decide by it whether to
        call `load`. After `close` it asks no other rank, and returns what this one sees.
        """
        if not self._is_open:
            return super().latest()
        leads = self._world.rank == 0
        found: list[int | None] = self._agreed(
            "latest", lambda: super(RankedReads, self).latest() if leads else None
        )
        return found[0]
