"""Offloaded state in the saves of a Checkpointer: what takes part in them.

PinLedger: which pinned generations of an optimizer belong to checkpoints, and which are free.
ShardedSaves: FSDP2 ranks, whose state is in the files of a checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from iobench.checkpoint.manifest import MANIFEST, FileRecord, Manifest, PinnedGeneration
from iobench.checkpoint.place import RemoteCopyOf, SaveParticipant
from iobench.checkpoint.rebuild import PerRank, SavedPerRank
from iobench.checkpoint.retention import KeepLast, Retention, outlines, readable_manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import (
    DataMismatchError,
    OptionError,
    StateError,
    StateMismatchError,
    TransferError,
    UsageError,
    transfer_errors,
)
from iobench.offload.convert import (
    ExportedState,
    SlotsFile,
    description_of,
    file_of,
    load_state,
    state_dict_of,
)
from iobench.offload.engine import Engine
from iobench.offload.files import read_layout
from iobench.offload.layout import ADAM, GenerationRecord, Pin, read_records, record_of_pin
from iobench.offload.parameters import kept_values, kind_of, put_values, specs_of
from iobench.offload.restore import HeldPin
from iobench.offload.state import OptimizerState
from iobench.offload.update import step_counter
from iobench.ranks.world import World
from iobench.remote.remote import Remote
from iobench.remote.source_file import LocalDamageError
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory


class PinLedger(SaveParticipant):
    """The pins of an optimizer that checkpoints name, or that pending saves will name.

    It is the SaveParticipant of `Checkpointer(..., offload=optimizer)`: each save pins the state,
    which copies nothing, and its manifest names the pin. A PinnedFiles for its drain.

    A pin is released when no manifest names it: after a save that was not committed, and after
    the removal of its checkpoint is durable. So a manifest never names a generation that is gone,
    however the process ends. Pins that a killed process left without a manifest are released by
    `start`. Another thread than the trainer's calls `durable`, `ended` and `open_file`.
    """

    holds = True

    def __init__(self, state: OptimizerState) -> None:
        self._state, self._layout = state, state.running().layout
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        """Of the pending saves: a load waits for them. It has its records after its end, too."""
        self._named: dict[int, str] = {}
        self._pending: dict[str, Save] = {}
        self._own: set[str] = set()
        self._gone: set[str] = set()
        """Pins that no checkpoint names, not even after a power cut."""

    def check(
        self, *, keep: Retention | None, placed: bool, tiers: Sequence[Any], world: World
    ) -> None:
        """Raise OptionError for options of a Checkpointer that it does not go together with."""
        if world.size > 1:
            raise OptionError(
                f"offload: this job has {world.size} ranks, and the parameters are not DTensors; "
                "use fully_shard, or give each rank an optimizer and a Checkpointer in directories "
                "of its own, with world='alone'"
            )
        if any(not isinstance(one, Remote) for one in tiers):
            raise OptionError(
                "offload: takes tiers=[Remote(...)]; a snapshot has no optimizer state"
            )
        if placed:
            raise OptionError("offload: not with placement; a generation is in local storage first")
        most = self._layout.pins
        if keep is None or (isinstance(keep, KeepLast) and keep.count >= most):
            kept = "keeps all checkpoints" if keep is None else f"keeps {keep.count}"
            raise OptionError(
                f"offload: the optimizer has pins={most} and the Checkpointer {kept}; it "
                "needs one pin more than keep=KeepLast(n) keeps"
            )

    def open(self, store: CheckpointStore, drain: Any) -> None:
        """Take part in the saves to `store`. With a `drain` a remote tier gets the state too."""
        if not isinstance(store, DirectoryStore):
            raise OptionError(f"offload: {store} must be a directory")
        self._store, self.exports = store, drain is not None
        owner = str(store.directory).encode(errors="surrogateescape")
        self._owner = xxhash.xxh3_64_hexdigest(owner)
        if drain is not None:
            drain.copier.offload = self

    def start(self) -> None:
        """Read all manifests; release the pins that this directory held for none of them."""
        unread: set[int] = set()
        for step, one in outlines(self._store, self._store.steps()).items():
            if one is None:
                unread.add(step)
            elif one.offload is not None:
                self._named[step] = one.offload.pin
        named = set(self._named.values())
        self._wait()
        for pin in self._state.running().store.pins:
            own = pin.name and pin.owner == self._owner and pin.step not in unread
            if own or pin.name in named:
                self._own.add(pin.name)
        self.sweep()

    def make_room(self, freeing: Iterator[None]) -> None:
        """Release what is free. Raises UsageError when all pins belong to checkpoints."""
        self.sweep()
        while self._full and next(freeing, "nothing more") is None:
            self.sweep()
        if self._full:
            raise UsageError(
                f"all pins={self._layout.pins} of the offloaded optimizer belong to checkpoints; "
                "construct it with more pins, or keep fewer checkpoints"
            )

    @property
    def _full(self) -> bool:
        """Whether no pin is left."""
        return len(self._state.held) >= self._layout.pins

    def hold(self, save: Save) -> None:
        """Pin the state after the last step for `save`. Waits for nothing."""
        name, self._engine = secrets.token_hex(8), self._state.running()
        self._state.pin(Pin(save.step, name, self._owner))
        with self._lock:
            self._own.add(name)
            self._pending[name] = save

    def durable(self, save: Save) -> tuple[PinnedGeneration, list[FileImage]]:
        """Wait until the pin of `save` is durable. Return it with what a remote tier needs of it.

        Raises TransferError when it never will be.
        """
        name, engine = self._name(save), self._engine
        assert engine is not None  # `hold` was called
        record = engine.wait_for_pin(name)
        if record is None:
            raise TransferError(
                f"{self._state.directory}: the offload engine ended before the generation was "
                "durable"
            )
        pinned = PinnedGeneration(
            directory=str(self._state.directory),
            pin=name,
            generation=record.generation,
            updates=record.updates,
            files=(file_of(self._layout, record),) if self.exports else (),
        )
        return pinned, [description_of(self._layout, record)] if self.exports else []

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> SlotsFile:
        """Open the file `record` of a pinned generation, for a remote tier.

        Raises LocalDamageError when the generation is gone or damaged.
        """
        directory = self._state.directory
        try:
            layout = read_layout(directory)
            found = _pinned_record(read_records(directory, layout), pinned.pin)
        except (TransferError, DataMismatchError, UsageError) as error:
            raise LocalDamageError(str(error)) from error
        if found is None or found.damaged or file_of(layout, found) != record:
            raise LocalDamageError(
                f"{directory}: the generation of pin {pinned.pin} is gone, or damaged"
            )
        return SlotsFile(directory, layout, found)

    def ended(self, save: Save) -> None:
        """The commit of `save` has ended. If its checkpoint exists, the pin belongs to it."""
        name = self._name(save)
        manifest = readable_manifest(self._store, save.step, files=False)
        with self._lock:
            if manifest and manifest.pinned and manifest.pinned[0].pin == name:
                self._named[save.step] = name
            del self._pending[name]
            removed = self._removed()
        if removed:  # here, and not in the trainer's thread
            self._sync()
            with self._lock:
                self._gone |= removed

    def _name(self, save: Save) -> str:
        with self._lock:
            return next(name for name, one in self._pending.items() if one is save)

    def settle(self) -> None:
        """Wait until the pins of pending saves are durable. Raises the failure of the engine."""
        if self._pending:
            self._wait()

    def _wait(self) -> None:
        if not self._state.closed:
            self._state.settled().wait()

    def sweep(self) -> None:
        """Release the pins that no checkpoint and no pending save needs. Waits for no pin."""
        with self._lock:
            for name, save in list(self._pending.items()):
                if save.status in ("skipped", "dropped", "failed"):
                    del self._pending[name]
                if save.status in ("skipped", "dropped"):
                    self._gone.add(name)
            self._removed()
            free = self._own - {*self._named.values(), *self._pending}
            synced = free <= self._gone
        if self._state.closed or not free:
            return
        if not synced:
            self._sync()
        self._state.settled().unpin(sorted(free))
        self._state.held.difference_update(free)
        self._own -= free
        with self._lock:
            self._gone -= free

    def restore(self, manifest: Manifest, remote_copy: RemoteCopyOf | None) -> None:
        """Let model and optimizer go on from the generation of a checkpoint.

        Only the parameters are read, unless only a remote tier has the state. Raises
        DataMismatchError when nothing can be restored; the optimizer is closed then.
        """
        pinned, step = manifest.offload, manifest.step
        if pinned is None:
            raise DataMismatchError(
                f"{self._store}: step {step} was saved without an offloaded optimizer, or by FSDP2 "
                "ranks, whose checkpoints a job of ranks loads"
            )
        try:
            if not self._is_here(pinned):
                self._state.close()
                self._state.resume(HeldPin(pinned.pin))
        except DataMismatchError as error:
            exported = remote_copy is not None and all(one.files for one in manifest.pinned)
            found = remote_copy(manifest) if exported and remote_copy is not None else None
            if found is None:
                raise
            warnings.warn(
                f"step {step}: the optimizer is read from {found[0]}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
            self._restore_files(manifest, *found)

    def _is_here(self, pinned: PinnedGeneration) -> bool:
        """Whether `resume` has just taken this generation."""
        state, taken = self._state, self._state.restored
        if state.closed or taken is None:
            return False
        now = state.settled().updates
        same = (taken.generation, taken.updates) == (pinned.generation, now)
        return same and state.untouched

    def _restore_files(self, manifest: Manifest, location: str | Path, writer: Writer) -> None:
        """Go on from the files of a checkpoint at `location`; fill the parameters.

        They become the newest generation here, durable on return. Reads and compares all of the
        state. Raises DataMismatchError for damage, StateMismatchError for another model, UsageError
        for another optimizer, TransferError. The optimizer is closed then.
        """
        state, source = self._state, ExportedState(manifest, location, writer)
        source.layout.check_same(specs_of(state.groups), source.where)
        if len(source.groups) != len(state.groups):
            counts = f"{len(state.groups)} of them", f"{len(source.groups)} of them"
            raise StateMismatchError(source.where, misshaped={"parameter groups": counts})
        if (kind := kind_of(source.groups[0])) != state.kind:
            raise UsageError(f"{source.where} has the state of {kind}, not of {state.kind}")
        state.reopen()
        try:
            put_values(state.groups, source.groups)
            state.replace(source, source.updates)
        except BaseException:
            with contextlib.suppress(TransferError):  # of the error that is being raised
                state.close()
            raise

    def _removed(self) -> set[str]:
        """Forget the checkpoints that were removed; return their pins. Needs the lock."""
        # A save that replaces a checkpoint puts it aside, and a crash puts it back.
        saving = {save.step for save in self._pending.values()}
        steps = [
            step
            for step in self._named
            if step not in saving and not (self._store.locate(step) / MANIFEST).exists()
        ]
        return {self._named.pop(step) for step in steps}

    def _sync(self) -> None:
        """Make removals durable: a power cut must not bring back a checkpoint without its pin."""
        with transfer_errors("removing", self._store.directory):
            sync_directory(self._store.directory)


def _pinned_record(records: list[GenerationRecord], name: str) -> GenerationRecord | None:
    for pin in records[0].pins if records else ():
        if pin.name == name:
            return record_of_pin(records, pin)
    return None


_KEY = "optimizer"


class ShardedSaves(SaveParticipant):
    """The SaveParticipant of ranks that each have the state of their own shards.

    The files of a checkpoint have the state as DTensors, under the key "optimizer", so any number
    of ranks can load it. Nothing is pinned.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

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

    def expected(self, like: Any) -> dict[str, Any]:
        """Return `like` with the tensors that `added_to` adds, without any bytes."""
        state = {}
        for number, parameter in enumerate(self._state.parameters()):
            one = torch.empty_like(parameter.detach(), dtype=torch.float32, device="meta")
            state[number] = {"step": step_counter(0), **dict.fromkeys(ADAM, one)}
        return {**(like or {}), _KEY: {"state": state}}

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
