"""Restoring: what a Checkpointer lists, restores and removes, in all tiers and with all ranks.

Rank 0 knows what there is, and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.piece_reader import shared_reader
from iobench.checkpoint.place import SaveParticipant
from iobench.checkpoint.ranked.structure import is_sharded
from iobench.checkpoint.restore import (
    Candidates,
    Loaded,
    OnCorrupt,
    restore,
)
from iobench.checkpoint.retention import by_age
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import StateMismatchError, UsageError
from iobench.ranks.control import Control
from iobench.ranks.restore_plan import RestoreMode
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory import MemorySlot
from iobench.remote.snapshot_memory import MemoryCandidates, SnapshotMemory
from iobench.remote.tiered_store import Listed, TieredCandidates, TieredStore
from iobench.replicas.nearest import ReplicaCandidates
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
    participant: SaveParticipant
    _opening: TieredStore | None = field(default=None, init=False)

    def begin(self) -> None:
        """Ask the remote tier for its checkpoints; wait if the local tier has none. In rank 0."""
        if self.tier is not None:
            self._opening = TieredStore(self.tier, self._own.serials())
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

    def _tiers_now(self, tier: LocalTier, *, opening: bool = False) -> list[Listed]:
        """Return the checkpoints of both tiers. New saves count as newer than all of them.

        With `opening` the list that was asked for at the start will do.
        """
        found = self._opening if opening else None
        self.settle()
        if found is None:
            found = TieredStore(tier, self._own.serials())
            found.ask()
            self._own.seen(found.last_serial)
        return found.listed()

    def _stored(self, *, opening: bool = False) -> Candidates:
        """Return the checkpoints of all tiers, as rank 0 sees them.

        Without a remote tier they are those of the store; rank 0 knows their age.
        """
        tier = self.tier
        if tier is None:
            known = self._own.serials() if self.ranks.leads else {}
            return Candidates(self.store, self.writer, known)
        look = partial(self._tiers_now, tier, opening=opening)
        listed = [Listed(*one) for one in self.ranks.led("list of the tiers", look)]
        return TieredCandidates(tier, self.writer, str(tier.remote), tier.remote.writer, listed)

    def steps(self, *, is_open: bool) -> list[int]:
        """Return the steps of all complete checkpoints. See Checkpointer.steps."""
        if self.tier is None or (self.ranks.many and not is_open):
            return self.store.steps()
        return self._stored().steps()

    def latest(self, *, is_open: bool) -> int | None:
        """Return the step of the checkpoint that was saved last. See Checkpointer.latest."""
        # After a fork or close another process may save here: the ledger may be out of date.
        found = self._stored() if is_open else self.store

        def last() -> int | None:
            steps = by_age(found)
            return steps[-1] if steps else None

        return self.ranks.led("latest", last) if is_open else last()

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
            if not local and step not in {one.step for one in self._tiers_now(tier)}:
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
        ranks, participant = self.ranks, self.participant
        candidates, offload = self._stored(opening=True), None
        if participant.holds:
            tiers = candidates if isinstance(candidates, TieredCandidates) else None
            remote_copy = None if tiers is None else tiers.remote_copy
            offload = partial(participant.restore, remote_copy=remote_copy)
        replicas, in_memory = None, False
        if self.replicator is not None:
            candidates = replicas = ReplicaCandidates(
                candidates, ranks=ranks, replicator=self.replicator
            )
            in_memory = replicas.look(step)
        if self.memory is not None:
            slots = self._slots(self.memory, candidates)
            in_memory = in_memory or bool(slots)
            candidates = MemoryCandidates(candidates, slots, ranks=ranks.world.size)
        with shared_reader(ranks, mode, in_memory=in_memory) as reader:
            state, loaded = restore(
                candidates,
                step,
                on_corrupt=on_corrupt,
                like=participant.expected(like),
                offload=offload,
                ranks=ranks,
                reader=reader,
            )
        version = None if replicas is None else replicas.version_of(loaded.step)

        def note() -> None:
            if self.ledger is not None:
                self.ledger.resumed_from(loaded.step)
                self.ledger.seen(0 if version is None else version.serial)

        ranks.agreed(f"resume from step {loaded.step}", note)
        if self.replicator is not None:
            self.replicator.resumed(version)
        return participant.take(state), loaded

    def _slots(self, memory: SnapshotMemory, stored: Candidates) -> dict[int, MemorySlot]:
        """Return the slots of this rank with checkpoints that all ranks have in memory, by step."""
        own = partial(memory.committed, stored.serials())
        every = self.ranks.agreed("steps in memory", own)
        found = set.intersection(*({(step, serial) for step, serial in one} for one in every))
        slots = ((step, memory.kept(step, serial)) for step, serial in found)
        return {step: slot for step, slot in slots if slot is not None}


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
