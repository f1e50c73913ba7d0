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

_NICE = 10  # about a tenth of the CPU when training uses all of it


class InSlot(Protocol):
    """A copy in a slot, with its save."""

    @property
    def save(self) -> Save: ...
    @property
    def slot(self) -> Slot: ...


_Held = TypeVar("_Held", bound=InSlot)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a state in a slot, with its save."""

    save: Save
    serialized: Serialized
    slot: Slot


class Persister(Generic[_Held]):
    """Keeps track of free and lent slots, of waiting snapshots and of the one being written.

    The newest waiting snapshot is written next, and older ones are dropped. With `in_order=True`
    every snapshot is written, in order.

    `persist` writes one snapshot and raises on failure. It runs in a thread of low CPU and I/O
    priority, which ends when no snapshot waits. The end of the interpreter waits for this thread.
    After the interpreter began to end it starts no threads, and `submit` writes in the caller.
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
        # Use `with self._lock`, not the Condition: Condition.__exit__ is Python code, and Ctrl-C at
        # its first bytecode would leave the lock held. An RLock, because a signal handler may save
        # while the main thread holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def take(self, on_full: OnFull, save: Save) -> Slot | None:
        """Return a free slot for `save`; None when no slot is free and `on_full` is "skip".

        "wait" waits for a free slot. "supersede" takes the slot of the oldest waiting snapshot,
        which is then never written; without one it waits. `give(save)` returns the slot, also
        after an exception in here.
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
            self._lent[slot] = save  # before the removal: Ctrl-C in between must not lose the slot
            self._free.remove(slot)
            return slot

    def take_from(
        self, pool: SlotPool, save: Save, *, pinned: bool, on_full: OnFull
    ) -> Slot | None:
        """`take` a slot and give it, from `pool`, the memory for the save. Raises StateError."""
        if pool.grow(save.size_bytes):
            self.for_each_free(lambda slot: pool.ready(slot, pinned=pinned))
        slot = self.take(on_full, save)
        if slot is not None:
            pool.ready(slot, pinned=pinned)
        return slot

    def for_each_free(self, prepare: Callable[[Slot], None]) -> None:
        """Call `prepare` for every free slot. Only the thread that takes slots may call this."""
        with self._lock:
            free = list(self._free)
        for slot in free:
            prepare(slot)

    def give(self, save: Save) -> None:
        """Return the slot taken for `save`, unless its snapshot was submitted."""
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
        """Write `snapshot` in the background, at once or in its turn; then its slot is free.

        Raises RuntimeError when no thread can be started; then the caller keeps the slot.
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
            except BaseException:  # Ctrl-C too: a thread that did start ends when it sees None here
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
        """Call `call` once no slot is lent, no snapshot waits and none is being written.

        The call happens at once, or in the thread that makes the persister idle. This method never
        waits, so any thread may use it, even one that takes part in a write.
        """
        with self._lock:
            self._when_idle.append(call)
            calls = self._calls_if_idle()
        for call in calls:
            call()

    def raise_failure(self) -> None:
        """Raise the errors of the background since the last call."""
        with self._lock:
            failures = list(self._failures)
        if not failures:
            return
        for other in failures[1:]:
            failures[0].add_note(f"a later failure: {other!r}")
        try:
            raise failures[0]
        finally:  # after the raise: a Ctrl-C here has the failure as its context
            with self._lock:
                del self._failures[: len(failures)]

    def fail(self, save: Save, error: BaseException) -> None:
        """Record that `save` failed. The trainer's thread raises `error` later."""
        error.add_note(f"in the background, while step {save.step} was saved")
        with self._lock:
            save.fail(error)
            self._failures.append(error)

    def _calls_if_idle(self) -> list[Callable[[], None]]:
        """Return the calls that are due now. Each is returned once."""
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
        """Return the next snapshot to write; None ends the thread."""
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
    """Lower the priority of the calling thread. Warn when the system does not allow it.

    A warnings filter may turn the warning into an exception.
    """
    try:
        linux.yield_to_others(_NICE)
    except OSError as error:
        warnings.warn(
            f"checkpoints are written at the trainer's own priority ({error})",
            RuntimeWarning,
            stacklevel=1,
        )
