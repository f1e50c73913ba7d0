"""Restoring: what a Checkpointer lists, restores and removes, in all tiers and with all ranks.

Rank 0 knows what there is, and tells the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.load.candidates import StoredCandidates
from iobench.checkpoint.load.reader import piece_reader
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import by_age
from iobench.checkpoint.participant import RemoteCopyOf, SaveParticipant
from iobench.checkpoint.ranked.content import data_file
from iobench.checkpoint.restore import Loaded, OnCorrupt, RestoringRanks, restore
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.ranks import JobRanks
from iobench.errors import DataMismatchError, UsageError
from iobench.ranks.restore_plan import RestoreMode
from iobench.remote.local_tier import LocalTier
from iobench.remote.nearest import Nearest
from iobench.remote.snapshot_memory import SnapshotMemory
from iobench.replicas.replicator import Replicator
from iobench.replicas.restoring import Chosen, RestoreChoice
from iobench.writers.base import Writer

if TYPE_CHECKING:
    from iobench.remote.both_tiers import TieredCandidates

__all__ = ["Restoring"]


@dataclass(kw_only=True)
class Restoring:
    """Restores checkpoints of `store`. `ledger` is that of rank 0.

    `tier` is the store with copies in a remote tier, and `memory` has snapshots that were written.
    """

    ranks: JobRanks
    store: CheckpointStore
    writer: Writer
    ledger: Ledger | None = None
    tier: LocalTier | None = None
    memory: SnapshotMemory | None = None
    replicator: Replicator | None = None
    participant: SaveParticipant | None = None
    _opening: Nearest | None = field(default=None, init=False)

    def begin(self) -> None:
        """Ask the remote tier for its checkpoints; wait if the local tier has none. In rank 0."""
        if self.tier is not None:
            self._opening = self._new_nearest(self.tier)
            self._opening.begin()
            if not self.tier.steps():
                self.settle()

    def settle(self) -> None:
        """Take notice of the list of the remote tier that was asked for at the start."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening.ask()
            self._own.seen(opening.last_serial)

    @property
    def _own(self) -> Ledger:
        assert self.ledger is not None  # this is rank 0
        return self.ledger

    def _new_nearest(self, tier: LocalTier) -> Nearest:
        return Nearest(tier, self.writer, self._own.serials())

    def _nearest(self, tier: LocalTier) -> Nearest:
        """Return the checkpoints of both tiers. New saves count as newer than all of them."""
        self.settle()
        nearest = self._new_nearest(tier)
        nearest.ask()
        self._own.seen(nearest.last_serial)
        return nearest

    def _both_tiers(self) -> TieredCandidates | None:
        """Return the checkpoints of both tiers, as rank 0 sees them; None without tiers."""
        tier = self.tier
        if tier is None:
            return None
        from iobench.remote.both_tiers import Listed, TieredCandidates

        def listed() -> list[Any] | None:
            return self._nearest(tier).listed() if self.ranks.leads else None

        found = self.ranks.agreed("list of the tiers", listed)[0]
        remote = tier.remote
        listing = [Listed(*one) for one in found]
        return TieredCandidates(tier, self.writer, str(remote), remote.writer, listing)

    def steps(self, *, is_open: bool) -> list[int]:
        """Return the steps of all complete checkpoints. See Checkpointer.steps."""
        if self.tier is None or (self.ranks.many and not is_open):
            return self.store.steps()
        if not self.ranks.many:
            return self._nearest(self.tier).candidates().steps()
        both = self._both_tiers()
        assert both is not None
        return both.steps()

    def latest(self, *, is_open: bool) -> int | None:
        """Return the step of the checkpoint that was saved last. See Checkpointer.latest."""
        if not is_open:
            # After a fork or close another process may save here: the ledger may be out of date.
            steps = by_age(self.store)
            return steps[-1] if steps else None
        found: list[int | None] = self.ranks.agreed(
            "latest", lambda: self._latest() if self.ranks.leads else None
        )
        return found[0]

    def _latest(self) -> int | None:
        if self.tier is not None:
            return self._nearest(self.tier).newest()
        steps = by_age(self.store, self._own.serials())
        return steps[-1] if steps else None

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step` from all tiers. See Checkpointer.remove."""

        def remove() -> None:
            if self.memory is not None:
                self.memory.forget(step)
            if self.ranks.leads:
                self._remove(step)

        self.ranks.agreed(f"remove of step {step}", remove)

    def _remove(self, step: int) -> None:
        tier = self.tier
        self.settle()
        if tier is None or self._own.holds(step):
            self._own.remove(step)
            return
        if step not in self._nearest(tier).candidates().steps():
            raise UsageError(f"there is no checkpoint of step {step}")
        tier.remote.remove(step)
        tier.drain.queue.forget(step)

    def restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any, mode: RestoreMode
    ) -> tuple[Any, Loaded]:
        """Return the state of the checkpoint `step`, or of the newest one. See Checkpointer.load.

        The persister is idle.
        """
        if self.ranks.many:
            return self._restore_together(step, on_corrupt, like, mode)
        found = None if self.memory is None else self.memory.restore(step, like)
        state, loaded = found or self._restore_stored(step, on_corrupt, like)
        if self.memory is not None and found is None:
            loaded = self.memory.told(loaded)
        self._own.resumed_from(loaded.step)
        return state, loaded

    def _restore_stored(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self.tier is None:
            return restore(
                StoredCandidates(self.store, self.writer),
                step,
                on_corrupt=on_corrupt,
                like=like,
                known=self._own.serials() if step == "latest" else None,
                offload=self._going_on(None),
            )
        nearest, self._opening = self._opening or self._new_nearest(self.tier), None
        go_on = self._going_on(nearest.remote_copy)
        found = nearest.restore(step, on_corrupt=on_corrupt, like=like, offload=go_on)
        self._own.seen(nearest.last_serial)
        return found

    def _going_on(self, remote_copy: RemoteCopyOf | None) -> Callable[[Manifest], None] | None:
        held = self.participant
        return None if held is None else partial(held.restore, remote_copy=remote_copy)

    def _restore_together(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any, mode: RestoreMode
    ) -> tuple[Any, Loaded]:
        both = self._both_tiers()
        choice = RestoreChoice(
            world=self.ranks.world,
            together=self.ranks.together,
            candidates=both or StoredCandidates(self.store, self.writer),
            writer=self.writer,
            serials=(both or self._own).serials if self.ranks.leads else None,
            replicator=self.replicator,
        )
        choice.look(step)
        while True:
            chosen = choice.choose()
            try:
                state, loaded = self._restore_chosen(choice, chosen, step, on_corrupt, like, mode)
                break
            except DataMismatchError as error:
                if chosen is None or not chosen.only_in_memory or step != "latest":
                    raise
                choice.without(chosen.plan, str(error))
        version = choice.version_of(loaded.step, chosen)

        def note() -> None:
            if self.ledger is not None:
                self.ledger.resumed_from(loaded.step)
                self.ledger.seen(version.serial)

        self.ranks.agreed(f"resume from step {loaded.step}", note)
        if self.replicator is not None:
            self.replicator.resumed(version)
        if self.memory is not None and not loaded.sources:
            loaded = replace(loaded, sources={str(self.store): "read"})
        return state, loaded

    def _restore_chosen(
        self,
        choice: RestoreChoice,
        chosen: Chosen | None,
        step: int | Literal["latest"],
        on_corrupt: OnCorrupt,
        like: Any,
        mode: RestoreMode,
    ) -> tuple[Any, Loaded]:
        """Restore what was chosen; without a choice, let the restore say what is wrong."""
        ranks, candidates, owners = self.ranks, choice.candidates, None
        known = choice.serials() if choice.serials is not None and step == "latest" else None
        try:
            if chosen is not None:
                step, candidates = chosen.plan.version.step, chosen.candidates
            if chosen is not None and self.memory is not None:
                version = chosen.plan.version
                slot = self.memory.kept(version.step, version.serial)
                has = ranks.agreed(f"step {step} in memory", lambda: slot is not None)
                if all(has) and slot is not None:
                    from iobench.checkpointer.memory.reader import MemoryCandidates

                    candidates = MemoryCandidates(candidates, version.step, slot)
                    owners = {data_file(rank): rank for rank in range(ranks.world.size)}
            with piece_reader(
                ranks.trainer, mode, deadline_s=ranks.deadline_s, owners=owners
            ) as reader:
                every = RestoringRanks(
                    rank=ranks.world.rank,
                    size=ranks.world.size,
                    together=ranks.together,
                    reader=reader,
                )
                return restore(
                    candidates, step, on_corrupt=on_corrupt, like=like, known=known, ranks=every
                )
        finally:
            for note in chosen.close() if chosen else ():
                warnings.warn(f"a replica was replaced: {note}", RuntimeWarning, stacklevel=5)
