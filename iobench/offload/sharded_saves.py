"""ShardedSaves: FSDP2 ranks with offloaded state in the saves of a Checkpointer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iobench.checkpoint.manifest import Manifest, PinnedGeneration
from iobench.checkpoint.per_rank import PerRank, SavedPerRank
from iobench.checkpoint.place import RemoteCopyOf
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, OptionError, RankError, StateError, UsageError
from iobench.offload.groups import kept_values
from iobench.offload.held_pins import HeldPins
from iobench.offload.layout import ADAM
from iobench.offload.restore import HeldPin
from iobench.offload.state import OptimizerState
from iobench.offload.stock import load_state, state_dict_of
from iobench.offload.update import step_counter
from iobench.ranks.world import World
from iobench.writers.image import FileImage

__all__ = ["ShardedSaves"]

_KEY = "optimizer"


class ShardedSaves:
    """The SaveParticipant of ranks that each have the state of their own shards.

    The files of a checkpoint have the state as DTensors, under the key "optimizer", so any number
    of ranks can load it. Each rank also pins its generation. A pin is no more than a short way: as
    many ranks as saved, with all of their pins, read 2 of 14 bytes. So the oldest pin gives way
    when there is no room, and a save that has none is as good.

    Only `durable` and `ended` are called by another thread than the trainer's.
    """

    exports = full = False

    def __init__(self, state: OptimizerState) -> None:
        self._state, self._pins = state, HeldPins(state)
        self._lock = threading.Lock()
        self._own: list[str] = []
        """Names of the pins of this Checkpointer, the oldest first."""
        self._pending: list[tuple[Save, str]] = []

    def check(
        self, *, keep: Retention | None, placed: bool, tiers: Sequence[Any], world: World
    ) -> None:
        """Raise OptionError unless the ranks of the Checkpointer are those of the DTensors."""
        del keep, placed, tiers
        ranks = self._state.ranks
        if (world.rank, world.size) != (ranks.rank, ranks.size) or world.size == 1:
            raise OptionError(
                f"offload: the DTensors are of {ranks.size} ranks, and the Checkpointer of "
                f"{world.size}; both need the same ranks, two or more. Otherwise save "
                "optimizer.state_dict() with the model's"
            )

    def open(self, store: CheckpointStore, drain: Any) -> None:
        """Take part in the saves to `store`."""
        del drain  # it copies the files, which have all
        self._owner = str(store)

    def start(self) -> None:
        """Find the pins of the job before."""
        self._own = [pin.name for pin, own in self._pins.found(self._owner) if own]

    def make_room(self, *ways: Callable[[], None]) -> None:
        """Nothing to do: a save needs no pin."""

    def added_to(self, state: Any) -> Any:
        """Return `state` with the optimizer's of this rank, read from storage into memory.

        Waits until the last step is durable. Raises StateError for another state than a dict
        without this key, UsageError before the first step, TransferError, DataMismatchError.
        """
        if not isinstance(state, dict) or _KEY in state:
            raise StateError(f"offload: a state must be a dict without the key {_KEY!r}")
        saved = state_dict_of(self._state, whole=True)
        record = self._state.running().store.base
        if record is None:
            raise UsageError("nothing to save before the first call of step()")
        for group, values in zip(
            saved["param_groups"], kept_values(self._state.groups), strict=True
        ):
            group.update(values)  # a learning rate may be a tensor
        # A rank that had no gradient has counted fewer steps than the others.
        counts = PerRank([int(count) for count in record.counts])
        return {**state, _KEY: {**saved, "updates": record.updates, "counts": counts}}

    def hold(self, save: Save) -> None:
        """Pin the state after the last step for `save`, if a pin is free or can be released."""
        with self._lock:
            pending = [name for _, name in self._pending]
            old = [name for name in self._own if name not in pending]
            while len(self._state.held) >= self._pins.most and old:
                self._release([old.pop(0)])
            if len(self._state.held) < self._pins.most:
                name = self._pins.hold(save.step, self._owner)
                self._own.append(name)
                self._pending.append((save, name))

    def _release(self, names: Sequence[str]) -> None:
        self._pins.release(names)
        self._own = [name for name in self._own if name not in names]

    def durable(self, save: Save) -> tuple[PinnedGeneration | None, list[FileImage]]:
        """Wait until the pin of `save` is durable. Return it; None if it has none."""
        with self._lock:
            name = next((name for one, name in self._pending if one is save), None)
        return (None if name is None else self._pins.durable(name)), []

    def ended(self, save: Save) -> None:
        """The commit of `save` has ended. Its pin may give way to later ones."""
        with self._lock:
            self._pending = [(one, name) for one, name in self._pending if one is not save]

    def settle(self) -> None:
        """Wait until the pins of pending saves are durable. Raises the failure of the engine."""
        if self._pending:
            self._pins.wait()

    def sweep(self) -> None:
        """Release the pins of saves that are not made. Waits for nothing."""
        with self._lock:
            gone = [
                name
                for save, name in self._pending
                if save.status in ("skipped", "dropped", "failed")
            ]
            self._pending = [(save, name) for save, name in self._pending if name not in gone]
            if gone:
                self._release(gone)

    # A load.

    def restore(self, manifest: Manifest, remote_copy: RemoteCopyOf | None) -> None:
        raise AssertionError(manifest, remote_copy)  # in a job of one process

    def has(self, pinned: PinnedGeneration) -> bool:
        """Whether this rank still has the pin."""
        return self._pins.has(pinned.pin)

    def go_on(self, pinned: PinnedGeneration) -> bool:
        """Go on from the pins of all ranks; read nothing where `resume` has just taken them.

        False, in all ranks, if one of them is damaged. The optimizers are closed then.
        """
        state, ranks = self._state, self._state.ranks
        if all(ranks.gather(ranks.each(lambda: self._pins.is_here(pinned)))):
            return True
        ranks.each(state.close)

        def resume() -> bool:
            try:
                state.resume(HeldPin(pinned.pin))
            except (DataMismatchError, RankError):
                return False
            return True

        return all(ranks.gather(ranks.each(resume)))

    def expected(self) -> dict[str, Any]:
        """Return the tensors that `added_to` adds, without any bytes."""
        state = {}
        for number, parameter in enumerate(self._state.parameters()):
            like = torch.empty_like(parameter.detach(), dtype=torch.float32, device="meta")
            state[number] = {"step": step_counter(0), **dict.fromkeys(ADAM, like)}
        return {_KEY: {"state": state}}

    def take(self, state: Any) -> Any:
        """Go on from the optimizer's part of `state`, in all ranks; return the rest.

        It is a new generation, durable on return, and its weights are in the parameters. Raises
        StateError when another number of ranks has counted different steps of one parameter.
        """
        saved = state.pop(_KEY)
        counts = saved["counts"]
        if isinstance(counts, SavedPerRank):
            if any(one != counts.values[0] for one in counts.values):
                raise StateError(
                    f"some of the {len(counts.values)} ranks that saved this had no gradient in "
                    "some steps: only as many ranks can go on from their moments"
                )
            counts = counts.values[0]
        for number, values in saved["state"].items():
            values["step"] = step_counter(counts[number])
        self._state.reopen()
        load_state(self._state, saved, saved["updates"])
        return state
