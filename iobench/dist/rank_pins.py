"""LeadingPins, FollowingPins: the pins of one rank that checkpoints of all ranks name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from iobench.checkpoint.manifest import PinnedGeneration
from iobench.checkpoint.order import outlines
from iobench.checkpoint.pin_ledger import PinLedger
from iobench.checkpoint.pinned_state import PinnedState, described_pin
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import TransferError, UsageError
from iobench.writers.image import FileImage

__all__ = ["FollowingPins", "LeadingPins"]


class LeadingPins(PinLedger):
    """The pins of rank 0, which knows what checkpoints there are and tells the other ranks.

    A checkpoint is known by its `attempt`, the random name of its save.
    """

    def __init__(self, state: PinnedState, store: DirectoryStore, *, exports: bool) -> None:
        super().__init__(state, store, exports=exports)
        self._attempts: dict[str, str] = {}
        self._untold: list[str] = []

    def lists(self) -> list[dict[str, Any]]:
        """Begin; return for each rank whose pins it has, and which of them checkpoints name."""
        manifests = outlines(self._store, self._store.steps())
        ranks = self._state.ranks
        read = [one for one in manifests.values() if one and len(one.pinned) == ranks]
        self._attempts = {one.pinned[0].pin: one.attempt for one in read}
        self._begin(manifests)
        unread = sorted(step for step, one in manifests.items() if one is None)
        return [
            {
                "owner": self.owner,
                "named": {one.attempt: one.pinned[rank].pin for one in read},
                "unread": unread,
            }
            for rank in range(ranks)
        ]

    def begin(self, own: dict[str, Any]) -> None:
        """It has begun by `lists`."""

    def gone(self) -> list[str]:
        """Release what is free. Return the checkpoints whose pins no rank needs any more."""
        self.sweep()
        return list(self._untold)

    def told(self, gone: Sequence[str]) -> None:
        """All ranks know that these are gone."""
        self._untold = [one for one in self._untold if one not in gone]

    def _release(self, free: set[str]) -> None:
        super()._release(free)
        self._untold += [self._attempts.pop(name) for name in free if name in self._attempts]

    def ended(self, save: Save, attempt: str | None = None) -> None:
        """See FollowingPins. A save without a pin is one that failed in this rank."""
        with self._lock:
            name = next((name for name, one in self._pending.items() if one is save), None)
        if name is not None and attempt is not None:
            self._attempts[name] = attempt
        if name is not None:
            super().ended(save)


class FollowingPins:
    """The pins of another rank. It releases what rank 0 says, and what it knows to be free.

    A pin of a save whose end is not known, because a rank was lost, stays: the next start decides.
    Only `durable` and `ended` are called by another thread than the trainer's.
    """

    def __init__(self, state: PinnedState, *, exports: bool) -> None:
        """With `exports` a remote tier gets the state too."""
        self._state, self._exports = state, exports
        self._lock = threading.Lock()
        self._owner = ""
        self._pending: dict[str, Save] = {}
        self._named: dict[str, str] = {}
        """Pins by the attempt of their checkpoint."""
        self._free: set[str] = set()
        self._others = 0

    def lists(self) -> None:
        """Rank 0 has the lists."""

    def begin(self, own: dict[str, Any]) -> None:
        """Take the list of rank 0; release the pins that no checkpoint names."""
        self._owner = own["owner"]
        found = self._state.found()
        here = {pin.name for pin in found}  # the optimizer's directory may be a new one
        self._named = {at: pin for at, pin in own["named"].items() if pin in here}
        named, unread = set(self._named.values()), set(own["unread"])
        for pin in found:
            if pin.name in named:
                continue
            if pin.owner == self._owner and pin.step not in unread:
                self._free.add(pin.name)
            else:
                self._others += 1
        self._release()

    def make_room(self, *ways: Callable[[], None]) -> None:
        """Release what is free; while no pin is left, try the `ways`."""
        self._release()
        for way in ways:
            if self._full:
                way()
                self._release()

    @property
    def _full(self) -> bool:
        with self._lock:
            held = len(self._pending) + len(self._named) + len(self._free)
        return held + self._others >= self._state.most

    def gone(self) -> list[str]:
        """Only rank 0 knows."""
        return []

    def told(self, gone: Sequence[str]) -> None:
        """Rank 0 says that these checkpoints are gone, also after a power cut."""
        with self._lock:
            self._free |= {self._named.pop(one) for one in gone if one in self._named}
        self._release()

    def _release(self) -> None:
        with self._lock:
            for name, save in list(self._pending.items()):
                if save.status in ("skipped", "superseded"):
                    del self._pending[name]
                    self._free.add(name)
            free = set(self._free)
        if free and not self._state.closed:
            self._state.release(free)
            with self._lock:
                self._free -= free

    def hold(self, save: Save) -> None:
        """Pin the state after the last step for `save`. Waits for nothing."""
        if self._full:
            raise UsageError(f"all pins={self._state.most} of this rank belong to checkpoints")
        name = self._state.hold(save.step, self._owner)
        with self._lock:
            self._pending[name] = save

    def durable(self, save: Save) -> tuple[PinnedGeneration, list[FileImage]]:
        """See PinLedger."""
        with self._lock:
            name = next((name for name, one in self._pending.items() if one is save), None)
        if name is None:
            raise TransferError(f"step {save.step}: its state is not pinned")
        return described_pin(self._state, name, exports=self._exports)

    def ended(self, save: Save, attempt: str | None) -> None:
        """Rank 0 has said whether the checkpoint of `save` exists, and its name."""
        with self._lock:
            name = next((name for name, one in self._pending.items() if one is save), None)
            if name is None:
                return
            del self._pending[name]
            if attempt is None:
                self._free.add(name)
            else:
                self._named[attempt] = name

    def settle(self) -> None:
        """Wait until the pins of pending saves are durable. Raises the failure of the engine."""
        if self._pending:
            self._state.wait()
