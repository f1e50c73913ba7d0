"""PinLedger: which pinned generations of an optimizer belong to checkpoints, and which are free."""

from __future__ import annotations

import threading
from collections.abc import Callable

from iobench.checkpoint.manifest import MANIFEST, PinnedGeneration
from iobench.checkpoint.order import outlines, readable_manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import UsageError, transfer_errors
from iobench.offload.held_pins import HeldPins
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory

__all__ = ["PinLedger"]


class PinLedger:
    """The pins of `state` that checkpoints in `store` name, or that pending saves will name.

    A pin is released when no manifest names it: after a save that was not committed, and after
    the removal of its checkpoint is durable. So a manifest never names a generation that is gone,
    however the process ends. Pins that a killed process left without a manifest are released by
    `start`. Only `durable` and `ended` are called by another thread than the trainer's.
    """

    def __init__(self, state: HeldPins, store: DirectoryStore, *, exports: bool = False) -> None:
        """With `exports` a remote tier gets the state too."""
        self._state, self._store, self.exports = state, store, exports
        self._lock = threading.Lock()
        self._named: dict[int, str] = {}
        self._pending: dict[str, Save] = {}
        self._own: set[str] = set()
        self._gone: set[str] = set()
        """Pins that no checkpoint names, not even after a power cut."""
        self._others = 0

    def start(self) -> None:
        """Read all manifests; release the pins that this directory held for none of them."""
        unread: set[int] = set()
        for step, one in outlines(self._store, self._store.steps()).items():
            if one is None:
                unread.add(step)
            elif isinstance(one.offload, PinnedGeneration):
                self._named[step] = one.offload.pin
        named = set(self._named.values())
        for pin in self._state.found(self.owner):
            if pin.name in named or (pin.own and pin.step not in unread):
                self._own.add(pin.name)
            else:
                self._others += 1
        self.sweep()

    @property
    def owner(self) -> str:
        """The name by which pins say whose they are."""
        return str(self._store.directory)

    def find_room(self, *ways: Callable[[], None]) -> bool:
        """Release what is free. While no pin is left, try the `ways` to free one.

        Return whether a pin is left.
        """
        self.sweep()
        for way in ways:
            if self.full:
                way()
                self.sweep()
        return not self.full

    def make_room(self, *ways: Callable[[], None]) -> None:
        """Like `find_room`. Raises UsageError when all pins belong to checkpoints."""
        if not self.find_room(*ways):
            raise UsageError(
                f"all pins={self._state.most} of the offloaded optimizer belong to checkpoints; "
                "construct it with more pins, or keep fewer checkpoints"
            )

    @property
    def full(self) -> bool:
        """Whether no pin is left."""
        return len(self._own) + self._others >= self._state.most

    def hold(self, save: Save) -> None:
        """Pin the state after the last step for `save`. Waits for nothing."""
        name = self._state.hold(save.step, self.owner)
        with self._lock:
            self._own.add(name)
            self._pending[name] = save

    def durable(self, save: Save) -> tuple[PinnedGeneration, list[FileImage]]:
        """Wait until the pin of `save` is durable. Return it with what a remote tier needs of it.

        Raises TransferError when it never will be.
        """
        pinned = self._state.durable(self._name(save))
        if not self.exports:
            return pinned, []
        pinned, described = self._state.export(pinned)
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
            self._state.wait()

    def sweep(self) -> None:
        """Release the pins that no checkpoint and no pending save needs. Waits for no pin."""
        with self._lock:
            for name, save in list(self._pending.items()):
                if save.status in ("skipped", "superseded", "failed"):
                    del self._pending[name]
                if save.status in ("skipped", "superseded"):
                    self._gone.add(name)
            self._removed()
            free = self._own - {*self._named.values(), *self._pending}
            synced = free <= self._gone
        if self._state.closed or not free:
            return
        if not synced:
            self._sync()
        self._state.release(free)
        self._own -= free
        with self._lock:
            self._gone -= free

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
