"""DrainQueue: the checkpoints of a run and the states of their remote copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from iobench.checkpoint.save import CopyState, Save

NOT_DURABLE: tuple[CopyState, ...] = ("waiting", "draining")
"""States of a copy that is not in the remote tier and should be."""
PENDING: tuple[CopyState, ...] = (*NOT_DURABLE, "durable")
"""States of a copy that the drain works on."""
_THERE: tuple[CopyState, ...] = ("durable", "verified")
_SETTLED: tuple[CopyState, ...] = ("verified", "dropped", "failed")


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A checkpoint and the state of its remote copy.

    It was saved at `since_s`, of the monotonic clock; `created_s` is its time in the manifest.
    """

    step: int
    serial: int
    since_s: float
    created_s: float
    size_bytes: int = 0
    state: CopyState = "waiting"
    durable_at_s: float | None = None
    """When this process made its remote copy durable, in seconds since the epoch."""
    local: bool = True
    """Whether the local tier has it; not after a save that went to the remote tier directly, and
    not after the retention of the local tier has removed it."""

    @classmethod
    def of(cls, save: Save, serial: int, *, size_bytes: int = 0, direct: bool) -> Queued:
        """Return the entry of a save that has just ended; `direct`: to the remote tier alone."""
        return cls(
            step=save.step,
            serial=serial,
            since_s=time.monotonic(),
            created_s=save.created_s,
            size_bytes=size_bytes,
            state="durable" if direct else "waiting",
            durable_at_s=time.time() if direct else None,
            local=not direct,
        )

    @property
    def is_there(self) -> bool:
        """Whether the remote tier has it, durable."""
        return self.state in _THERE


class DrainQueue:
    """States by step. A step that is saved anew begins anew, with another serial number.

    With `in_order` the oldest checkpoint is copied first, else the newest. All methods may be
    called from any thread.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self._in_order = in_order
        self.changed = threading.Condition(threading.RLock())
        self._entries: dict[int, Queued] = {}
        self.on_durable: Callable[[int], None] | None = None
        """Called with the step of each checkpoint that became durable in the remote tier."""

    def put(self, entry: Queued) -> None:
        """Add the entry of a step; it replaces an older one."""
        with self.changed:
            self._entries[entry.step] = entry
            self._tell(entry.step, entry.state)
            self.changed.notify_all()

    def learn(self, entry: Queued, *, newer: bool = False) -> None:
        """Add what rank 0 has told, in another rank, unless the step was saved anew since.

        `newer`: only if nothing of this save is known.
        """
        with self.changed:
            known = self._entries.get(entry.step)
            if known is not None and known.serial < entry.serial:
                known = None
            if known is not None and (newer or known.serial > entry.serial):
                return
            since_s = time.monotonic() if known is None else known.since_s  # of this node's clock
            self._entries[entry.step] = replace(entry, since_s=since_s)
            if entry.is_there and not (known is not None and known.is_there):
                self._tell(entry.step, "durable")

    def move(self, entry: Queued, state: CopyState, *, of: Collection[CopyState]) -> bool:
        """Set the state of `entry` if it is one `of` these: compare and set.

        False if it is another one, because a thread has settled the entry since, or if its step was
        saved anew or removed.
        """
        with self.changed:
            if not self.has(entry, of):
                return False
            found = self._entries[entry.step]
            at_s = time.time() if state == "durable" else found.durable_at_s
            self._entries[entry.step] = replace(found, state=state, durable_at_s=at_s)
            self._tell(entry.step, state)
            self.changed.notify_all()
            return True

    def _tell(self, step: int, state: CopyState) -> None:
        if self.on_durable is not None and state == "durable":
            self.on_durable(step)

    def has(self, entry: Queued, of: Collection[CopyState] = PENDING) -> bool:
        """Return whether `entry` has one of these states, and its step was not saved anew since."""
        found = self.get(entry.step)
        return found is not None and found.serial == entry.serial and found.state in of

    def forget(self, step: int, serial: int | None = None) -> None:
        """Remove the entry of a step; with `serial` unless it was saved anew."""
        with self.changed:
            found = self.get(step)
            if found is not None and serial in (None, found.serial):
                del self._entries[step]
                self.changed.notify_all()

    def retired(self, step: int) -> None:
        """Record that the local tier has no checkpoint of `step` any more."""
        with self.changed:
            if (found := self._entries.get(step)) is not None:
                self._entries[step] = replace(found, local=False)
            self.changed.notify_all()

    def forget_settled(self, in_remote: Callable[[int], bool] | None) -> None:
        """Remove the entries of checkpoints that no tier has any more.

        `in_remote` returns whether the remote tier has a step; None: it does not answer.
        """
        with self.changed:
            for one in list(self._entries.values()):
                if one.local or one.state in NOT_DURABLE:
                    continue
                if one.state not in _THERE or (in_remote is not None and not in_remote(one.step)):
                    del self._entries[one.step]

    def get(self, step: int) -> Queued | None:
        """Return the entry of a step."""
        with self.changed:
            return self._entries.get(step)

    def entries(self) -> list[Queued]:
        """Return all entries, the last saved one first."""
        with self.changed:
            return sorted(self._entries.values(), key=lambda one: one.serial, reverse=True)

    def pending(self) -> list[Queued]:
        """Return those that are not settled: not durable, or not read back. Last saved first."""
        return [one for one in self._in_states(PENDING) if one.local]

    def not_durable(self) -> list[Queued]:
        """Return those that are not in the remote tier and should be. Last saved first."""
        return self._in_states(NOT_DURABLE)

    def _in_states(self, states: Collection[CopyState]) -> list[Queued]:
        """Return the entries in these states; those of many checkpoints are settled."""
        with self.changed:
            found = [one for one in list(self._entries.values()) if one.state in states]
        return sorted(found, key=lambda one: one.serial, reverse=True)

    def to_copy(self) -> list[Queued]:
        """Return those that are not in the remote tier and should be, in the order of copies."""
        return self.not_durable()[:: -1 if self._in_order else 1]

    def next(self) -> Queued | None:
        """Return the entry to work on: first copies, then read-backs."""
        pending = self.pending()[:: -1 if self._in_order else 1]
        return next((one for one in pending if one.state != "durable"), next(iter(pending), None))

    def unsettled(self, steps: Collection[int]) -> set[int]:
        """Return those of `steps` whose local files are still needed: unknown ones too."""
        with self.changed:
            settled = {one.step for one in list(self._entries.values()) if one.state in _SETTLED}
        return set(steps) - settled
