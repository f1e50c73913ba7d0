"""PinLedger: which pinned generations of an optimizer belong to checkpoints, and which are free."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from iobench.checkpoint.manifest import MANIFEST, Manifest, PinnedGeneration
from iobench.checkpoint.place import RemoteCopyOf
from iobench.checkpoint.retention import KeepLast, Retention, outlines, readable_manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import DataMismatchError, OptionError, UsageError, transfer_errors
from iobench.offload.held_pins import HeldPins
from iobench.offload.state import OptimizerState
from iobench.ranks.world import World
from iobench.remote.remote import Remote
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory

__all__ = ["PinLedger"]


class PinLedger:
    """The pins of an optimizer that checkpoints name, or that pending saves will name.

    It is the SaveParticipant of `Checkpointer(..., offload=optimizer)`: each save pins the state,
    which copies nothing, and its manifest names the pin.

    A pin is released when no manifest names it: after a save that was not committed, and after
    the removal of its checkpoint is durable. So a manifest never names a generation that is gone,
    however the process ends. Pins that a killed process left without a manifest are released by
    `start`. Only `durable` and `ended` are called by another thread than the trainer's.
    """

    exports = False

    def __init__(self, state: OptimizerState) -> None:
        self._state, self._pins = state, HeldPins(state)
        self._lock = threading.Lock()
        self._named: dict[int, str] = {}
        self._pending: dict[str, Save] = {}
        self._own: set[str] = set()
        self._gone: set[str] = set()
        """Pins that no checkpoint names, not even after a power cut."""
        self._others = 0

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
        most = self._pins.most
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
        self._owner = str(store.directory)
        if drain is not None:
            drain.offload = self._pins

    def start(self) -> None:
        """Read all manifests; release the pins that this directory held for none of them."""
        unread: set[int] = set()
        for step, one in outlines(self._store, self._store.steps()).items():
            if one is None:
                unread.add(step)
            elif one.offload is not None:
                self._named[step] = one.offload.pin
        named = set(self._named.values())
        for pin, own in self._pins.found(self._owner):
            if pin.name in named or (own and pin.step not in unread):
                self._own.add(pin.name)
            else:
                self._others += 1
        self.sweep()

    def make_room(self, *ways: Callable[[], None]) -> None:
        """Release what is free. While no pin is left, try the `ways` to free one.

        Raises UsageError when all pins belong to checkpoints.
        """
        self.sweep()
        for way in ways:
            if self.full:
                way()
                self.sweep()
        if self.full:
            raise UsageError(
                f"all pins={self._pins.most} of the offloaded optimizer belong to checkpoints; "
                "construct it with more pins, or keep fewer checkpoints"
            )

    @property
    def full(self) -> bool:
        """Whether no pin is left."""
        return len(self._own) + self._others >= self._pins.most

    def added_to(self, state: Any) -> Any:
        """The files of a checkpoint have nothing of it."""
        return state

    def hold(self, save: Save) -> None:
        """Pin the state after the last step for `save`. Waits for nothing."""
        name = self._pins.hold(save.step, self._owner)
        with self._lock:
            self._own.add(name)
            self._pending[name] = save

    def durable(self, save: Save) -> tuple[PinnedGeneration, list[FileImage]]:
        """Wait until the pin of `save` is durable. Return it with what a remote tier needs of it.

        Raises TransferError when it never will be.
        """
        pinned = self._pins.durable(self._name(save))
        if not self.exports:
            return pinned, []
        pinned, described = self._pins.export(pinned)
        return pinned, [described]

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
            self._pins.wait()

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
        self._pins.release(free)
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
            self._pins.restore(pinned)
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
            self._pins.restore_files(manifest, *found)

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
