"""LocalCheckpointer: saves and restores the state of a trainer in one process."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self

from iobench.checkpoint.commit import Committer, LocalPlace, Place
from iobench.checkpoint.events import OnEvent, SaveEvents
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.load.candidates import StoredCandidates
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.option_check import check_flags, check_option, check_slots, rate_limit
from iobench.checkpoint.order import by_age
from iobench.checkpoint.persister import Persister, Snapshot, end_unclosed, newest
from iobench.checkpoint.restore import Loaded, OnCorrupt, restore
from iobench.checkpoint.retention import KeepAll, Retention
from iobench.checkpoint.safetensors_files import SafetensorsFormat
from iobench.checkpoint.save import Save
from iobench.checkpoint.schedule import Schedule
from iobench.checkpoint.serialized import Serializer
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import Content, LazyCopy, copy_into
from iobench.checkpoint.store import CheckpointStore, release_unclosed, reusing_files, store_at
from iobench.errors import OptionError, UsageError
from iobench.ranks.control import Control
from iobench.ranks.world import World
from iobench.units import parse_size
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Channel, Lease, LeaseState, OnFull
from iobench.writers.config import load_writer

__all__ = ["LocalCheckpointer"]

_REMEMBERED = 1000  # length of `saves`


class LocalCheckpointer:
    """What a Checkpointer does in one process, without tiers and replicas.

    See `iobench.Checkpointer` for the options.
    """

    _ranked = False
    _in_order = False  # whether every snapshot is written, the oldest first

    def __init__(
        self,
        location: str | Path,
        *,
        writer: Writer | str = "hybrid",
        slots: int = 2,
        on_full: OnFull = "wait",
        keep: Retention | None = None,
        schedule: Schedule | None = None,
        budget: int | str | None = None,
        bandwidth_limit: int | str | None = None,
        lazy: bool = False,
        reuse_files: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        check_slots(slots, on_full)
        check_option("location", location, str, Path, example='"runs/a"')
        check_option("writer", writer, str, Writer, example='"hybrid"')
        check_option("keep", keep, Retention, NoneType, example="KeepLast(3)")
        check_option("schedule", schedule, Schedule, NoneType, example="Every(500)")
        check_option("budget", budget, int, str, NoneType, example='"16GiB"')
        check_option("bandwidth_limit", bandwidth_limit, int, str, NoneType, example='"500MiB"')
        check_flags(lazy=lazy, reuse_files=reuse_files)
        if on_event is not None and not callable(on_event):
            raise OptionError(f"on_event={on_event!r}: takes a function of a Save and an event")
        limit = rate_limit(bandwidth_limit)
        self._writer = load_writer(writer) if isinstance(writer, str) else writer
        if not self._writer.stores:
            raise UsageError(f"writer {self._writer.name!r} stores nothing; choose another writer")
        pool = SlotPool(slots, None if budget is None else parse_size(budget))
        self._schedule, self._on_full, self._lazy = schedule, on_full, lazy
        self._store = reusing_files(self._store_at(location), reuse_files)
        self._open(location, keep or KeepAll(), pool, limit)
        copies: Channel[LazyCopy[Any]] = Channel(
            lambda: copies.serve(LazyCopy.run), name="iobench-snapshot", lingers=False, daemon=False
        )
        self._copies = copies
        self._lazy_save: Save | None = None
        self._saves: deque[Save] = deque(maxlen=_REMEMBERED)
        self._pid = os.getpid()
        self._events = None if on_event is None else SaveEvents(on_event)
        self.loaded: Loaded | None = None
        """Step that the last `load` restored, and the damaged checkpoints that it skipped."""
        # `close` detaches it, so `alive` also says that this Checkpointer is open.
        self._unclosed = weakref.finalize(
            self,
            end_unclosed,
            self._pid,
            self._persister,
            functools.partial(_ended, self._store, self._events),
        )
        self._unclosed.atexit = False
        interpreter_end.at_end(self, LocalCheckpointer._at_end)

    def _store_at(self, location: str | Path) -> CheckpointStore:
        return store_at(location, self._writer)

    def _open(
        self, location: str | Path, keep: Retention, pool: SlotPool, limit: int | None
    ) -> None:
        """Take the lock of the location, and make the parts that write checkpoints there."""
        self._serializer = Serializer()
        self._store.acquire()
        try:
            self._writer.require(location)
            self._store.clean()
            self._ledger = Ledger(self._store, keep)
        except BaseException:
            self._store.release()
            raise
        self._committer: Committer[Any] = self._new_committer(limit)
        pick = None if self._in_order else newest
        self._persister: Persister[Any] = Persister(pool, self._committer.persist, pick=pick)

    def _new_committer(self, limit: int | None) -> Committer[Any]:
        return Committer(
            control=Control(World.single()),
            format=SafetensorsFormat(),
            writer=self._writer,
            ledger=self._ledger,
            place=self._chooser(),
            rate_bytes_per_s=limit,
        )

    def _chooser(self) -> Callable[[Save, Any], Place]:
        """Return what chooses where a save is written."""
        local = LocalPlace(
            store=self._store, writer=self._writer, ledger=self._ledger, shared=self._ranked
        )
        return lambda *_: local

    @property
    def saves(self) -> tuple[Save, ...]:
        """The last 1,000 saves with their status, oldest first."""
        return tuple(self._saves)

    def due(self, step: int) -> bool:
        """Return whether to save after `step`, by the schedule. Call it once after every step."""
        if self._schedule is None:
            raise UsageError("due() needs a schedule: Checkpointer(..., schedule=Every(500))")
        return self._schedule.due(step)

    def prepare(self, state: Any, *, wait: bool = False) -> None:
        """Allocate the slots for states like `state`, so that the first saves need not.

        A thread of low priority makes the memory's pages, 0.1 to 2 seconds per GiB; with `wait`
        this returns when they are made. For a state with CUDA tensors it pins the memory. Nothing
        is copied. A save may begin earlier or have another state: it makes what is missing, and a
        save of CUDA tensors waits for the thread. Raises StateError for a state that cannot be
        saved or does not fit, and earlier errors of the background. The next save, `wait` or
        `close` raises what failed later.
        """
        self._check_usable()
        content = self._content_of(state)
        self._persister.prepare(content.size_bytes, wait=wait, pinned=not content.on_cpu)
        if wait:
            self._persister.raise_failure()

    def save_async(self, state: Any, step: int) -> Save:
        """Take a snapshot of `state`; a background thread writes it.

        On return the caller may change the state. With `lazy`, it may change numpy arrays and plain
        values at once, and tensors after `before_optimizer_step`. Nothing is durable yet: see the
        status of the Save, or call `wait`. Raises StateError for a state that cannot be saved or
        does not fit, UsageError for a step that is saved twice, and earlier errors of the
        background. After a UsageError nothing is copied.
        """
        began_s = time.perf_counter()
        content, save = self._begin_copy(state, step)
        lease = Lease(Snapshot(save=save, content=content))
        copy: Lease[LazyCopy[Any]] | None = None
        try:
            if not self._persister.take(lease, pinned=not content.on_cpu, on_full=self._on_full):
                save.status = "skipped"
            elif self._lazy and not interpreter_end.begun():
                copy = Lease(LazyCopy(lease, self._persister))
                self._lazy_save = save
                self._copies.submit(copy)
            else:
                save.pages_s = copy_into(lease.item.memory, content)
                lease.item.content = self._agreed_content(lease).without_memory()
                self._persister.submit(lease)
        except BaseException as error:
            save.fail(error)
            if copy is None or copy.state is LeaseState.HELD:
                self._give_up(lease)
            raise
        save.stall_s = time.perf_counter() - began_s
        if self._schedule:
            self._schedule.started(save)
        return save

    def save(self, state: Any, step: int) -> Save:
        """Write `state`. On return the checkpoint is durable and visible.

        Waits for background saves first. CPU tensors are written without a copy. Raises what
        `save_async` raises, and TransferError; then no part of the checkpoint is visible.
        """
        began_s = time.perf_counter()
        self.wait()
        content, save = self._begin(state, step)
        try:
            if content.on_cpu:
                self._committer.commit(save, content)
            else:
                self._save_from_gpu(Lease(Snapshot(save=save, content=content)))
        except BaseException as error:
            save.fail(error)
            raise
        save.stall_s = time.perf_counter() - began_s
        if self._schedule:
            self._schedule.started(save)
        return save

    def before_optimizer_step(self) -> None:
        """Wait until the copy of a lazy save is complete. Then the tensors may change.

        Raises errors of the background. Raises StateError when a tensor changed during the copy;
        that checkpoint is not saved.
        """
        self._finish_copy()
        self._persister.raise_failure()

    def wait(self) -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed."""
        self._check_usable()
        self._finish_copy()
        self._persister.wait()
        self._persister.raise_failure()

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        *,
        on_corrupt: OnCorrupt = "raise",
        like: Any = None,
    ) -> Any:
        """Return the state of the checkpoint `step`, or of the newest one. Waits for saves first.

        Every byte is compared with its checksum. A damaged checkpoint raises DataMismatchError.
        With `on_corrupt="previous"` the newest undamaged checkpoint before it is restored instead,
        with a RuntimeWarning; `loaded` gives its step. `like` is a state of the expected structure:
        a checkpoint of another model raises StateMismatchError, which lists missing, unexpected and
        mis-shaped names. Only the top-level entries of `like` are compared. Raises TargetError when
        there is no such checkpoint. Later checkpoints stay until a save of the same step replaces
        them. From the next save on they count as older than all others.
        """
        self._check_usable()
        self._finish_copy()
        self._persister.wait()
        state, self.loaded = self._restore(step, on_corrupt, like)
        return state

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        state, loaded = restore(
            StoredCandidates(self._store, self._writer),
            step,
            on_corrupt=on_corrupt,
            like=like,
            known=self._ledger.serials() if step == "latest" else None,
            offload=self._restore_offload(None),
        )
        self._ledger.resumed_from(loaded.step)
        return state, loaded

    def _restore_offload(self, nearest: Any) -> Callable[[Manifest], None] | None:
        """Return what lets an optimizer go on from a checkpoint; `nearest` has remote copies."""
        del nearest
        return None

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last; None when there is none.

        Manifests that this Checkpointer read when it opened, or wrote, are not read again.
        """
        # After a fork or close another process may save here, so the ledger may be out of date.
        owned = self._unclosed.alive and os.getpid() == self._pid
        steps = by_age(self._store, self._ledger.serials() if owned else None)
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in ascending order."""
        return self._store.steps()

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step`. Waits for saves first. UsageError if there is none."""
        self._check_usable()
        self._finish_copy()
        self._persister.wait()
        self._ledger.remove(step)

    def close(self) -> None:
        """Wait for every save, free the memory, release the lock, and raise the first error.

        A second call does nothing. When Ctrl-C interrupts the wait, the Checkpointer stays open.
        """
        if not self._unclosed.alive or os.getpid() != self._pid:
            return
        self._finish_copy()
        self._persister.wait()
        try:
            self._persister.raise_failure()
        finally:  # `detach` last: if Ctrl-C comes before it, a second close() does the work
            self._persister.free()
            self._store.release()
            if self._events is not None:
                self._events.end()
            self._unclosed.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"a checkpoint failed too: {failure!r}")

    def _at_end(self) -> None:
        self._finish_copy()
        self._persister.wait()
        if self._unclosed.detach():  # not a call: weakref makes none after its own atexit function
            end_unclosed(
                self._pid, self._persister, functools.partial(_ended, self._store, self._events)
            )

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a Checkpointer does not work in a forked child; make one there")
        if not self._unclosed.alive:
            raise UsageError("this Checkpointer is closed")

    def _content_of(self, state: Any) -> Content:
        """Return what a save of `state` would write; copy nothing. Raise what failed before."""
        self._persister.raise_failure()
        return self._serializer.serialize(state)

    def _begin(self, state: Any, step: int) -> tuple[Any, Save]:
        """Check the step, serialize the state (see Serializer), claim the step; copy nothing."""
        self._check_usable()
        self._finish_copy()
        self._persister.raise_failure()
        if type(step) is not int or step < 0:
            raise UsageError(f"step {step!r}: a whole number, 0 or more")
        serialized = self._serializer.serialize(state)
        save = Save(
            step=step, status="copying", created_s=time.time(), size_bytes=serialized.size_bytes
        )
        self._ledger.claim(save)
        self._add(save)
        return serialized, save

    def _add(self, save: Save) -> None:
        self._saves.append(save)
        if self._events is not None:
            self._events.watch(save)

    def _begin_copy(self, state: Any, step: int) -> tuple[Any, Save]:
        return self._begin(state, step)  # several ranks may still agree during the copy

    def _agreed_content(self, lease: Lease[Snapshot[Any]]) -> Any:
        return lease.item.content

    def _give_up(self, lease: Lease[Snapshot[Any]]) -> None:
        self._persister.give(lease)

    def _finish_copy(self) -> None:
        """Wait until a lazy copy is complete."""
        if os.getpid() != self._pid:
            return
        began_s = time.perf_counter()
        self._copies.drain(despite_failure=True)
        if self._lazy_save:
            self._lazy_save.stall_s += time.perf_counter() - began_s
        self._lazy_save = None
        if failure := self._copies.failure:  # of the channel: a LazyCopy reports its own failure
            self._copies.failure = None
            raise failure

    def _save_from_gpu(self, lease: Lease[Snapshot[Any]]) -> None:
        save, content = lease.item.save, lease.item.content
        try:
            self._persister.take(lease, pinned=True)
            memory = lease.item.memory
            save.pages_s = copy_into(memory, content)
            self._committer.commit(save, content, memory)
        finally:
            self._persister.give(lease)


def _ended(store: CheckpointStore, events: SaveEvents | None, failure: Exception | None) -> None:
    try:
        release_unclosed(store, failure)
    finally:
        # The garbage collector may call this in any thread, which must not wait.
        if events is not None and threading.current_thread() is threading.main_thread():
            events.end()
        elif events is not None:
            events.leave()
