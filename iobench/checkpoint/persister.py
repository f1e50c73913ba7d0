"""Persister: writes snapshots in the background, one at a time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from iobench import linux
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.interrupt_safe import Worker, start_workers

__all__ = ["InSlot", "OnFull", "Persister", "Snapshot"]

OnFull = Literal["wait", "skip", "supersede"]

_NICE = 10  # a tenth of the CPU where training wants all of it


class InSlot(Protocol):
    """What was copied into a slot, and the save that it is for."""

    @property
    def save(self) -> Save: ...
    @property
    def slot(self) -> Slot: ...


_Held = TypeVar("_Held", bound=InSlot)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a state in a slot, and the save that it is for."""

    save: Save
    serialized: Serialized
    slot: Slot


class Persister(Generic[_Held]):
    """Owns which slot is free or lent, which snapshot waits and which one is being written.

    Of those that wait the newest is written next, the older ones being dropped; with
    `in_order=True` every one is written.

    `persist` writes one snapshot and raises when it could not. It runs in a thread of low CPU and
    I/O priority that lives as long as there is something to write; an interpreter that ends waits
    for it. Where that has no threads any more, `submit` writes.
    """

    def __init__(
        self, slots: list[Slot], persist: Callable[[_Held], None], *, in_order: bool = False
    ) -> None:
        self._free = list(slots)
        self._lent: dict[Slot, Save] = {}
        self._persist, self._in_order = persist, in_order
        self._waiting: list[_Held] = []
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []
        self._when_idle: list[Callable[[], None]] = []
        # `with` takes the lock itself: Condition.__exit__ is Python code, and Ctrl-C at its begin
        # would leave it locked. Reentrant, as a signal handler may save while it is held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def take(self, on_full: OnFull, save: Save) -> Slot | None:
        """A free slot for `save`; None when there is none and `on_full` is "skip".

        Whatever interrupts this, or comes after it, `give(save)` gives the slot back.

        "wait" waits for one. "supersede" takes that of the oldest snapshot that waits, which is
        never written then, and waits only when none waits.
        """
        with self._lock:
            while not self._free:
                if on_full == "skip":
                    return None
                if on_full == "supersede" and self._waiting:
                    self._drop(self._waiting.pop(0))
                    continue
                self._changed.wait()
            slot = self._free[-1]
            self._lent[slot] = save  # first: in neither list it would be lost
            self._free.remove(slot)
            return slot

    def take_from(
        self, pool: SlotPool, save: Save, *, pinned: bool, on_full: OnFull
    ) -> Slot | None:
        """`take`, of a `pool` whose slots have room for the save then. Raises StateError."""
        if pool.grow(save.size_bytes):
            self.for_each_free(lambda slot: pool.ready(slot, pinned=pinned))
        slot = self.take(on_full, save)
        if slot is not None:
            pool.ready(slot, pinned=pinned)
        return slot

    def for_each_free(self, prepare: Callable[[Slot], None]) -> None:
        """`prepare` every free slot; only the thread that takes slots may ask for it."""
        with self._lock:
            free = list(self._free)
        for slot in free:
            prepare(slot)

    def give(self, save: Save) -> None:
        """Give back the slot taken for `save`, unless its snapshot was submitted."""
        with self._lock:
            lent = [slot for slot, owner in self._lent.items() if owner is save]
            for slot in lent:
                if slot not in self._free and all(one.slot is not slot for one in self._waiting):
                    self._free.append(slot)
                self._lent.pop(slot, None)
            self._changed.notify_all()
            calls = self._calls_if_idle()
        for call in calls:
            call()

    def submit(self, snapshot: _Held) -> None:
        """Have `snapshot` written, at once or in its turn; its slot is free again afterwards.

        Raises RuntimeError when no thread can be started; the slot stays the caller's then.
        """
        with self._lock:
            if self._thread is not None:
                snapshot.save.status = "waiting"
                self._waiting.append(snapshot)
                self._lent.pop(snapshot.slot, None)
                return
            thread = Worker(target=self._run, args=(snapshot,), name="iobench-persister")
            self._thread = thread
            try:
                if not interpreter_end.begun() and start_workers([thread]):
                    self._lent.pop(snapshot.slot, None)
                    return
            except BaseException:  # Ctrl-C too: a thread that did start sees that it is not wanted
                self._thread = None
                self._lent[snapshot.slot] = snapshot.save
                raise
            self._thread = threading.current_thread()
            self._lent.pop(snapshot.slot, None)
        self._write(snapshot)

    def wait(self) -> None:
        """Wait until nothing waits and nothing is written."""
        with self._lock:
            self._changed.wait_for(lambda: self._thread is None)

    def when_idle(self, call: Callable[[], None]) -> None:
        """`call` once no slot is lent, nothing waits and nothing is written.

        Now, or in the thread that ends that. Never waits, so that any thread may ask for it, one
        that helps to write too.
        """
        with self._lock:
            self._when_idle.append(call)
            calls = self._calls_if_idle()
        for call in calls:
            call()

    def raise_failure(self) -> None:
        """Raise what went wrong in the background since this was last asked."""
        with self._lock:
            failures = list(self._failures)
        if not failures:
            return
        for other in failures[1:]:
            failures[0].add_note(f"and after it: {other!r}")
        try:
            raise failures[0]
        finally:  # while it is raised: Ctrl-C in between has it as its context
            with self._lock:
                del self._failures[: len(failures)]

    def fail(self, save: Save, error: BaseException) -> None:
        """Note that `save` failed, to be raised in the trainer's thread."""
        error.add_note(f"in the background, while step {save.step} was saved")
        with self._lock:
            save.fail(error)
            self._failures.append(error)

    def _calls_if_idle(self) -> list[Callable[[], None]]:
        """What is to be called now; each is given out once."""
        if self._thread is not None or self._lent:
            return []
        calls, self._when_idle = self._when_idle, []
        return calls

    def _drop(self, snapshot: _Held) -> None:
        snapshot.save.status = "superseded"
        self._free.append(snapshot.slot)

    def _run(self, first: _Held) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        try:
            _lower_priority()
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            with self._lock:
                self._failures.append(error)
        self._write(first)

    def _write(self, first: _Held) -> None:
        snapshot: _Held | None = first
        while snapshot:
            try:
                self._persist(snapshot)
            except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
                self.fail(snapshot.save, error)
            snapshot = self._next(snapshot)
        with self._lock:
            calls = self._calls_if_idle()
        for call in calls:
            call()

    def _next(self, done: _Held) -> _Held | None:
        """The snapshot to be written next; None ends the thread."""
        with self._lock:
            self._free.append(done.slot)
            self._changed.notify_all()
            if not self._waiting:
                self._thread = None
                return None
            if self._in_order:
                return self._waiting.pop(0)
            newest = self._waiting.pop()
            for older in self._waiting:
                self._drop(older)
            self._waiting.clear()
            return newest


def _lower_priority() -> None:
    """Of the calling thread. A warning where that is not allowed, which may be an error here."""
    try:
        linux.yield_to_others(_NICE)
    except OSError as error:
        warnings.warn(
            f"checkpoints are written at the trainer's own priority ({error})",
            RuntimeWarning,
            stacklevel=1,
        )
