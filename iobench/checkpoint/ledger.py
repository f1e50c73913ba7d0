"""Ledger: which steps have a checkpoint, which are on the way, and which are not wanted longer."""

from __future__ import annotations

import threading
from functools import partial

from iobench.checkpoint.order import as_saved, readable_manifest
from iobench.checkpoint.removal import remove_all, warn_of
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import UsageError

__all__ = ["Ledger"]


class Ledger:
    """What is in `store`, known from its manifests at first and kept up to date from then on."""

    def __init__(self, store: CheckpointStore, keep: Retention) -> None:
        self._store, self._keep = store, keep
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}
        self._replaceable: set[int] = set()
        self._serials: dict[int, int | None] = {}
        self._created_s: dict[int, float] = {}
        self._unremovable: set[int] = set()
        for step in store.steps():
            manifest = readable_manifest(store, step)
            self._serials[step] = manifest.serial if manifest else None
            if manifest:  # else its age is unknown: retention leaves it, and load will tell
                self._created_s[step] = manifest.created_s
        self._last_serial = max((serial or 0 for serial in self._serials.values()), default=0)

    @property
    def next_serial(self) -> int:
        """The serial number of the next checkpoint that is committed."""
        return self._last_serial + 1

    def serials(self) -> dict[int, int]:
        """Serial numbers of checkpoints, by step: of those that can be read and stay as they are.

        One that a save on its way is to replace is left out.
        """
        with self._lock:
            replaced = self._saves.keys() & self._replaceable
            return {
                step: serial
                for step, serial in self._serials.items()
                if serial is not None and step not in replaced
            }

    def claim(self, save: Save) -> None:
        """Note that `save` is on its way. Raises UsageError when its step was saved already."""
        with self._lock:
            earlier = self._saves.get(save.step)
            if earlier and earlier.on_the_way:
                raise UsageError(f"step {save.step} is being saved already")
            if save.step in self._serials.keys() - self._replaceable:
                raise UsageError(
                    f"step {save.step} is saved already, in {self._store.locate(save.step)}; "
                    "remove(step) it first if it is to be replaced"
                )
            self._saves = {step: other for step, other in self._saves.items() if other.on_the_way}
            self._saves[save.step] = save

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`."""
        return step in self._serials

    def committed(self, save: Save) -> None:
        """`save` is durable and visible: note it, then remove what need not be kept any more.

        What cannot be removed is no failure of the save: a RuntimeWarning names it once, and every
        later save tries again.
        """
        with self._lock:
            self._serials[save.step] = self._last_serial = self.next_serial
            self._replaceable.discard(save.step)
            self._created_s[save.step] = save.created_s
            saved = as_saved(self._serials)
            obsolete = self._keep.obsolete(
                {step: self._created_s[step] for step in saved if step in self._created_s}
            )
        failures = remove_all(
            {step: partial(self.remove, step) for step in obsolete if step != save.step}
        )
        new = [error for step, error in failures.items() if step not in self._unremovable]
        self._unremovable = set(failures)
        warn_of(new)  # last: a warning may be an error

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Raises UsageError when there is none, TransferError."""
        if step not in self._serials:
            raise UsageError(f"there is no checkpoint of step {step}")
        self._store.remove(step)
        with self._lock:
            self._serials.pop(step, None)
            self._created_s.pop(step, None)

    def resumed_from(self, step: int) -> None:
        """Training goes on from `step`: later checkpoints may be replaced, step by step."""
        with self._lock:
            self._replaceable = {other for other in self._serials if other > step}
