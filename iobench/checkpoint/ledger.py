"""Ledger: which steps have a checkpoint, which are being saved, and which retention removes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from iobench.checkpoint.retention import Retention, in_save_order, outlines
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import UsageError
from iobench.writers.removal import remove_all, warn_of


class Ledger:
    """Contents of `store`: read from its manifests once, then updated by every save and removal.

    The manifests of a directory are read at once, so that an error is raised early. Those of a
    server are as many answers to wait for, and are read when a save needs their times. At once only
    those are read whose serial number the store does not list.
    """

    def __init__(self, store: CheckpointStore, keep: Retention) -> None:
        self._store, self._keep = store, keep
        # A signal handler that saves may run while it is held, so dictionaries are copied first.
        self._lock = threading.RLock()
        self._saves: dict[int, Save] = {}
        self._replaceable: set[int] = set()
        self._serials: dict[int, int | None] = dict.fromkeys(store.steps())
        self._serials.update(store.serials())
        self._created_s: dict[int, float] = {}
        self._unremovable: set[int] = set()
        self._last_serial = max(store.serials().values(), default=0)
        self._unread = set(self._serials)
        self._held: Counter[int] = Counter()
        self._read(lambda step: store.readers == 1 or self._serials[step] is None)

    def _read(self, wanted: Callable[[int], bool] = lambda _: True) -> None:
        """Read the manifests of `wanted` steps that were not read yet. Raises TransferError."""
        unread = sorted(filter(wanted, list(self._unread)))
        if not unread:
            return
        found = outlines(self._store, unread)  # no lock: a trainer may claim meanwhile
        with self._lock:
            for step in self._unread & self._serials.keys() & found.keys():
                manifest = found[step]
                # Otherwise its age is unknown: retention keeps it, and load reports it.
                if manifest is not None:
                    self._serials[step] = manifest.serial
                    self._created_s[step] = manifest.created_s
                    self._last_serial = max(self._last_serial, manifest.serial)
            self._unread -= found.keys()

    @property
    def is_read(self) -> bool:
        """Whether no manifest has to be read any more."""
        return not self._unread

    def serial_of(self, save: Save) -> int:
        """Return the serial number of `save`, or a new one if it has none.

        Reads all manifests: retention needs their times after the commit. Raises TransferError.
        """
        self._read()
        return save.serial or self.new_serial()

    def new_serial(self) -> int:
        """Return a serial number for a checkpoint; it is not used again, even if the save fails."""
        with self._lock:
            self._last_serial += 1
            return self._last_serial

    def seen(self, serial: int) -> None:
        """Note a serial number that is in use elsewhere: new ones are greater."""
        with self._lock:
            self._last_serial = max(self._last_serial, serial)

    def serials(self) -> dict[int, int]:
        """Return the serial numbers of the readable checkpoints, by step.

        A checkpoint that a pending save replaces is left out.
        """
        with self._lock:
            replaced = self._saves.keys() & self._replaceable
            return {
                step: serial
                for step, serial in self._serials.copy().items()
                if serial is not None and step not in replaced
            }

    def ages(self) -> dict[int, tuple[int, float]]:
        """Return serial number and seconds since the epoch of the readable checkpoints, by step."""
        self._read()
        with self._lock:
            created_s = self._created_s.copy()
            return {
                step: (serial, created_s[step])
                for step, serial in self._serials.copy().items()
                if serial is not None and step in created_s
            }

    def claim(self, save: Save) -> None:
        """Record `save` as pending. Raises UsageError when its step is saved already.

        Before it raises, the store is listed: a checkpoint that someone has removed is forgotten.
        """
        with self._lock:
            earlier = self._saves.get(save.step)
            if earlier and earlier.on_the_way:
                raise UsageError(f"step {save.step} is being saved already")
            if save.step in self._serials.keys() - self._replaceable and self._is_there(save.step):
                raise UsageError(
                    f"step {save.step} is saved already, in {self._store.locate(save.step)}; "
                    "to go on from there, call resume() or load() before the first save; to "
                    f"replace it, call remove({save.step}) first"
                )
            for step, other in self._saves.copy().items():
                if not other.on_the_way:
                    self._saves.pop(step, None)
            self._saves[save.step] = save

    def _is_there(self, step: int) -> bool:
        if step in self._store.steps():
            return True
        self._forget(step)
        return False

    def holds(self, step: int) -> bool:
        """Return whether there is a checkpoint of `step`."""
        return step in self._serials

    def committed(self, save: Save, serial: int) -> None:
        """Record that `save` is durable and visible, then remove what retention drops.

        `serial` is that of `serial_of`. A checkpoint that cannot be removed does not fail the save.
        A RuntimeWarning names it once, and later saves try again.
        """
        self._read()
        with self._lock:
            self._serials[save.step] = serial
            self._replaceable.discard(save.step)
            self._created_s[save.step] = save.created_s
        self.tidy(spare=save.step)

    def hold(self, step: int) -> None:
        """Let retention keep the checkpoint `step`, which someone reads, until `release`."""
        with self._lock:
            self._held[step] += 1

    def release(self, step: int) -> None:
        """End a `hold`. The next save removes the checkpoint if retention drops it."""
        with self._lock:
            self._held[step] -= 1

    def tidy(self, *, spare: int | None = None) -> None:
        """Remove what retention drops, but not `spare`; see `committed`.

        A process that was killed after a commit has left one checkpoint too many.
        """
        if spare is None:
            self._read()
        with self._lock:
            known_s = self._created_s.copy()
            saved = in_save_order(self._serials.copy())
            created_s = {step: known_s[step] for step in saved if step in known_s}
            kept = {spare, *self._held.elements()}
            obsolete = [step for step in self._keep.obsolete(created_s) if step not in kept]
        failures = remove_all({step: partial(self._remove, step) for step in obsolete})
        new = [error for step, error in failures.items() if step not in self._unremovable]
        self._unremovable = set(failures)
        warn_of(new)  # last: a warnings filter may turn it into an exception

    def would_keep(
        self, more: Mapping[int, tuple[int, float]], keep: Retention | None = None
    ) -> set[int]:
        """Return the steps of `more` that `keep` would keep if they were stored here too.

        `more` maps steps to serial numbers and seconds since the epoch. `keep` is by default the
        retention of the ledger.
        """
        self._read()
        with self._lock:
            serials = {**self._serials, **{step: serial for step, (serial, _) in more.items()}}
            ages = {**self._created_s, **{step: created for step, (_, created) in more.items()}}
        ordered = {step: ages[step] for step in in_save_order(serials) if step in ages}
        return more.keys() - set((keep or self._keep).obsolete(ordered))

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Raises UsageError when there is none, and TransferError."""
        if step not in self._serials:
            raise UsageError(f"there is no checkpoint of step {step}")
        self._remove(step)

    def _remove(self, step: int) -> None:
        self._store.remove(step)
        self._forget(step)

    def _forget(self, step: int) -> None:
        with self._lock:
            self._serials.pop(step, None)
            self._created_s.pop(step, None)
            self._unread.discard(step)

    def resumed_from(self, step: int) -> None:
        """Allow saves to replace the checkpoints after `step`, from which training continues."""
        with self._lock:
            self._replaceable = {other for other in list(self._serials) if other > step}
