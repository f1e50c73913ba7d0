"""Restoring: what a Checkpointer lists, restores and removes, in all tiers and with all ranks.

Rank 0 knows what there is, and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.piece_reader import HeldFiles, piece_reader
from iobench.checkpoint.place import RankedParticipant, RemoteCopyOf, SaveParticipant
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.ranked.structure import is_sharded
from iobench.checkpoint.restore import (
    Candidates,
    Loaded,
    OnCorrupt,
    StoredCandidates,
    restore,
)
from iobench.checkpoint.retention import by_age
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import StateMismatchError, UsageError
from iobench.ranks.control import Control
from iobench.ranks.restore_plan import RestoreMode
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory_pool import MemorySlot
from iobench.remote.snapshot_memory import MemoryCandidates, SnapshotMemory
from iobench.remote.tiered_store import Listed, TieredCandidates, TieredStore
from iobench.replicas.nearest import ReplicaCandidates
from iobench.replicas.recovery import RecoveryPlan
from iobench.replicas.replicator import Replicator
from iobench.writers.base import Writer


@dataclass(kw_only=True)
class Restoring:
    """Restores checkpoints of `store`. `ledger` is that of rank 0.

    `tier` is the store with copies in a remote tier, and `memory` has snapshots that were written.
    """

    ranks: Control
    store: CheckpointStore
    writer: Writer
    ledger: Ledger | None = None
    tier: LocalTier | None = None
    memory: SnapshotMemory | None = None
    replicator: Replicator | None = None
    participant: SaveParticipant | None = None
    _opening: TieredStore | None = field(default=None, init=False)

    def begin(self) -> None:
        """Ask the remote tier for its checkpoints; wait if the local tier has none. In rank 0."""
        if self.tier is not None:
            self._opening = self._new_tiers(self.tier)
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

    def _new_tiers(self, tier: LocalTier) -> TieredStore:
        return TieredStore(tier, self.writer, self._own.serials())

    def _now(self, tier: LocalTier, asked: TieredStore | None = None) -> TieredStore:
        """Return the checkpoints of both tiers. New saves count as newer than all of them.

        `asked` is a list that was asked for before.
        """
        self.settle()
        found = asked or self._new_tiers(tier)
        found.ask()
        self._own.seen(found.last_serial)
        return found

    def _listed_tiers(self) -> TieredCandidates | None:
        """Return the checkpoints of both tiers, as rank 0 sees them; None without tiers."""
        tier = self.tier
        if tier is None:
            return None
        found = self.ranks.led("list of the tiers", lambda: self._now(tier).listed())
        remote, listing = tier.remote, [Listed(*one) for one in found]
        return TieredCandidates(tier, self.writer, str(remote), remote.writer, listing)

    def steps(self, *, is_open: bool) -> list[int]:
        """Return the steps of all complete checkpoints. See Checkpointer.steps."""
        both = self._listed_tiers() if is_open or not self.ranks.many else None
        return self.store.steps() if both is None else both.steps()

    def latest(self, *, is_open: bool) -> int | None:
        """Return the step of the checkpoint that was saved last. See Checkpointer.latest."""
        if not is_open:
            # After a fork or close another process may save here: the ledger may be out of date.
            steps = by_age(self.store)
            return steps[-1] if steps else None
        return self.ranks.led("latest", self._latest)

    def _latest(self) -> int | None:
        steps = by_age(self._stored() if self.tier is None else self._now(self.tier).candidates())
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
        local = tier is None or self._own.holds(step)
        if tier is not None:
            if not local and step not in self._now(tier).candidates().steps():
                raise UsageError(f"there is no checkpoint of step {step}")
            tier.remove_remote(step)
        if local:
            self._own.remove(step)

    def restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any, mode: RestoreMode
    ) -> tuple[Any, Loaded]:
        """Return the state of the checkpoint `step`, or of the newest one. See Checkpointer.load.

        The persister is idle.
        """
        if self.ranks.many and self.participant is not None:
            ranked = cast(RankedParticipant, self.participant)  # see its `check`
            wanted = {**(like or {}), **ranked.expected()}
            state, loaded = self._restore_together(step, on_corrupt, wanted, mode)
            return ranked.take(state), loaded
        if self.ranks.many:
            return self._restore_together(step, on_corrupt, like, mode)
        candidates: Candidates = self._stored()
        remote_copy: RemoteCopyOf | None = None
        if self.tier is not None:
            asked, self._opening = self._opening, None
            tiers = self._now(self.tier, asked)
            candidates, remote_copy = tiers.candidates(), tiers.remote_copy
        if self.memory is not None:
            candidates = self.memory.candidates(candidates)
        held = self.participant
        state, loaded = restore(
            candidates,
            step,
            on_corrupt=on_corrupt,
            like=like,
            offload=None if held is None else partial(held.restore, remote_copy=remote_copy),
        )
        self._own.resumed_from(loaded.step)
        return state, loaded

    def _stored(self) -> StoredCandidates:
        """Return the checkpoints of the local tier. Rank 0 knows their age."""
        known = self._own.serials() if self.ranks.leads else {}
        return StoredCandidates(self.store, self.writer, known)

    def _restore_together(
        self,
        step: int | Literal["latest"],
        on_corrupt: OnCorrupt,
        like: Any,
        mode: RestoreMode,
    ) -> tuple[Any, Loaded]:
        ranks, memory, both = self.ranks, self.memory, self._listed_tiers()
        replicas = ReplicaCandidates(
            both or self._stored(),
            ranks=ranks,
            writer=self.writer,
            replicator=self.replicator,
        )
        replicas.look(step)
        slots = {} if memory is None else self._slots(replicas.plan, memory)
        snapshots = MemoryCandidates(replicas, slots)

        def held() -> HeldFiles | None:
            for one, slot in slots.items():
                if snapshots.has(one) and slot.kept is not None:
                    images = {image.path: image for image in slot.kept.files(slot.memory)}
                    return HeldFiles(images, {data_file(r): [r] for r in range(ranks.world.size)})
            return replicas.held()

        with piece_reader(ranks, mode, held) as reader:
            state, loaded = restore(
                replicas if memory is None else snapshots,
                step,
                on_corrupt=on_corrupt,
                like=like,
                ranks=ranks,
                reader=reader,
            )
        version = replicas.version_of(loaded.step)

        def note() -> None:
            if self.ledger is not None:
                self.ledger.resumed_from(loaded.step)
                self.ledger.seen(version.serial)

        ranks.agreed(f"resume from step {loaded.step}", note)
        if self.replicator is not None:
            self.replicator.resumed(version)
        return state, loaded

    def _slots(self, plan: RecoveryPlan | None, memory: SnapshotMemory) -> dict[int, MemorySlot]:
        """Return the slot of this rank with its file of what was chosen, if all ranks have one."""
        if plan is None:
            return {}
        version = plan.version
        slot = memory.kept(version.step, version.serial)
        has = self.ranks.agreed(f"step {version.step} in memory", lambda: slot is not None)
        return {version.step: slot} if all(has) and slot is not None else {}


class Stateful(Protocol):
    """A module, an optimizer, a scheduler: what saves and restores its own state."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from `state_dict`."""


def check_resumable(objects: Mapping[str, Stateful]) -> None:
    """Raise UsageError for what `resume` does not take."""
    if not isinstance(objects, Mapping):
        raise UsageError(
            f"resume: takes objects by the names that save() gave them, such as "
            f'{{"model": model}}, not a {type(objects).__name__}'
        )
    held = {id(p) for module in _modules(objects).values() for p in module.parameters()}
    for name, one in objects.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise UsageError(
                f"resume: {name!r} is a {type(one).__name__}, without load_state_dict; "
                "use load() for values"
            )
        if any(id(p) not in held for p in _parameters(one) if is_sharded(p)):
            raise UsageError(
                f"resume: {name!r} has sharded parameters that are in none of the modules: give "
                "the module too, or call load(like=...)"
            )


def expected_of(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states that a checkpoint is compared with: their DTensors give the shardings.

    They are those of the modules, and of optimizers with sharded parameters. The state of such an
    optimizer, if it is new, is made here (zeros). Other optimizers have no state to compare yet.
    """
    modules = _modules(objects)
    expected = {name: module.state_dict() for name, module in modules.items()}
    for name, one in objects.items():
        if isinstance(one, torch.optim.Optimizer) and any(map(is_sharded, _parameters(one))):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            get_optimizer_state_dict(torch.nn.ModuleList(modules.values()), one)
            expected[name] = one.state_dict()
    return expected


def _modules(objects: Mapping[str, Stateful]) -> dict[str, torch.nn.Module]:
    return {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}


def _parameters(one: Stateful) -> list[torch.Tensor]:
    groups = getattr(one, "param_groups", [])
    return [parameter for group in groups for parameter in group.get("params", ())]


def resume_into(objects: Mapping[str, Stateful], state: Any, where: str) -> None:
    """Load the entries of `state` into the objects of the same names.

    Raises StateMismatchError for a name that the checkpoint lacks; then nothing has changed.
    """
    missing = [name for name in objects if not isinstance(state, dict) or name not in state]
    if missing:
        raise StateMismatchError(where, missing=missing)
    for name, one in objects.items():
        one.load_state_dict(state[name])
