"""RankedReads: what the Checkpointer of several ranks lists and restores, from all tiers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from iobench.checkpoint.load.candidates import StoredCandidates
from iobench.checkpoint.load.reader import piece_reader
from iobench.checkpoint.ranked.content import data_file
from iobench.checkpoint.restore import Loaded, OnCorrupt, RestoringRanks, restore
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.errors import DataMismatchError
from iobench.ranks.control import Control
from iobench.ranks.together import T, together
from iobench.ranks.world import World
from iobench.replicas.replicator import Replicated, Replicator
from iobench.replicas.restoring import Chosen, Restoring

if TYPE_CHECKING:
    from iobench.remote.both_tiers import TieredCandidates
    from iobench.remote.local_tier import LocalTier
    from iobench.remote.remote import Remote

__all__ = ["RankedReads"]


class RankedReads(Checkpointer):
    """The read side of a RankedCheckpointer. Rank 0 knows what there is, and tells the others."""

    _world: World
    _control: Control
    _replicator: Replicator | None = None

    def _together(
        self, phase: str, work: Callable[[], T], tell: Callable[[T], Any] | None = None
    ) -> tuple[T, list[Any]]:
        return together(self._control, phase, work, tell, deadline_s=self._deadline_s)

    def _agreed(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        return self._together(phase, work)[1]

    def _new_tier(self, directory: Path, remote: Remote) -> LocalTier:
        from iobench.remote.drain import DrainRanks  # here: it takes time to import
        from iobench.remote.local_tier import LocalTier

        ranks = DrainRanks(
            thread=self._control.sub("drain", aside=True),
            trainer=self._control,
            deadline_s=self._deadline_s,
        )
        return LocalTier(directory, remote, ranks)

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        both = self._both_tiers()
        restoring = Restoring(
            world=self._world,
            together=self._together,
            candidates=both or StoredCandidates(self._store, self._writer),
            writer=self._writer,
            serials=(both or self._ledger).serials if self._world.rank == 0 else None,
            replicator=self._replicator,
        )
        restoring.look(step)
        while True:
            chosen = restoring.choose()
            try:
                state, loaded = self._restore_chosen(restoring, chosen, step, on_corrupt, like)
                break
            except DataMismatchError as error:
                if chosen is None or not chosen.only_in_memory or step != "latest":
                    raise
                restoring.without(chosen.plan, str(error))
        version = restoring.version_of(loaded.step, chosen)

        def note() -> None:
            if self._world.rank == 0:
                self._ledger.resumed_from(loaded.step)
                self._ledger.seen(version.serial)

        self._agreed(f"resume from step {loaded.step}", note)
        if self._replicator is not None:
            self._replicator.resumed(version)
        if self._memory is not None and not loaded.sources:
            loaded = replace(loaded, sources={str(self._store): "read"})
        return state, loaded

    def _restore_chosen(
        self,
        restoring: Restoring,
        chosen: Chosen | None,
        step: int | Literal["latest"],
        on_corrupt: OnCorrupt,
        like: Any,
    ) -> tuple[Any, Loaded]:
        """Restore what was chosen; without a choice, let the restore say what is wrong."""
        candidates, owners = restoring.candidates, None
        known = restoring.serials() if restoring.serials is not None and step == "latest" else None
        try:
            if chosen is not None:
                step, candidates = chosen.plan.version.step, chosen.candidates
            if chosen is not None and self._memory is not None:
                version = chosen.plan.version
                slot = self._memory.kept(version.step, version.serial)
                has = self._agreed(f"step {step} in memory", lambda: slot is not None)
                if all(has) and slot is not None:
                    from iobench.checkpointer.memory.reader import MemoryCandidates

                    candidates = MemoryCandidates(candidates, version.step, slot)
                    owners = {data_file(rank): rank for rank in range(self._world.size)}
            with piece_reader(
                self._control, self._restore_mode, deadline_s=self._deadline_s, owners=owners
            ) as reader:
                ranks = RestoringRanks(
                    rank=self._world.rank,
                    size=self._world.size,
                    together=self._together,
                    reader=reader,
                )
                return restore(
                    candidates,
                    step,
                    on_corrupt=on_corrupt,
                    like=like,
                    known=known,
                    ranks=ranks,
                )
        finally:
            for note in chosen.close() if chosen else ():
                warnings.warn(f"a replica was replaced: {note}", RuntimeWarning, stacklevel=5)

    def _both_tiers(self) -> TieredCandidates | None:
        """Return the checkpoints of both tiers, as rank 0 sees them; None without tiers."""
        tier = self._tier
        if tier is None:
            return None

        from iobench.remote.both_tiers import Listed, TieredCandidates

        def listed() -> list[Any] | None:
            return self._nearest(tier).listed() if self._world.rank == 0 else None

        found = self._agreed("list of the tiers", listed)[0]
        return TieredCandidates(
            tier,
            self._writer,
            str(tier.remote),
            tier.remote.writer,
            [Listed(*one) for one in found],
        )

    @property
    def replicas(self) -> tuple[Replicated, ...]:
        """Outcomes of the last 1,000 replications, oldest first; empty without `replicate`."""
        return () if self._replicator is None else tuple(self._replicator.replicas)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in ascending order.

        With `tiers` it is a call of all ranks: those of all tiers, as rank 0 sees them.
        """
        both = self._both_tiers() if self._is_open else None
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
