"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, end_unclosed
from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import OnEvent, Save, SaveEvents
from iobench.checkpoint.schedule import Every, Schedule
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.opening import CheckpointerOptions, Opening, WhenFull
from iobench.checkpointer.restoring import Stateful, check_resumable, expected_of, resume_into
from iobench.checkpointer.saving import Saving
from iobench.errors import OptionError, UsageError
from iobench.ranks.control import checkpointer_control
from iobench.ranks.restore_plan import RestoreMode, check_restore_mode
from iobench.ranks.world import AnyWorld
from iobench.remote.memory import TierUse
from iobench.remote.placement import Placement
from iobench.remote.remote import AnyTier
from iobench.replicas.partner import Partner
from iobench.replicas.replicator import Replicated
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Channel, Lease

DEADLINE_S = 1800.0


class Checkpointer:
    """Saves a training state to `location`, a directory or `s3://bucket/prefix`, and restores it.

        ckpt = Checkpointer("runs/a", keep=KeepLast(3), schedule=Every(500))
        for step, batch in enumerate(data):
            train(batch)
            if ckpt.due(step):
                ckpt.save_async({"model": model.state_dict(), "step": step}, step)
        ckpt.close()

    A checkpoint is the directory `step-N` with `manifest.json` in it. It becomes visible only when
    all of it is durable. Opening a directory removes what a killed process left half written.
    States are nested dicts, lists and tuples of tensors (CPU or CUDA), numpy arrays, numbers,
    strings, bytes and None. They are restored on the CPU.

    - `writer`: the I/O path: a Writer, its name, also with options ("odirect,threads=2"), or the
      path of a TOML file, see `load_writer`
    - `slots`: number of snapshots in host memory, 2 by default. With 1, a save waits until the
      previous one is on storage (CheckFreq). With more, it waits only for its copy (PCcheck). The
      newest waiting snapshot is written next; older ones become `dropped`
    - `on_full`: what `save_async` does when no slot is free: "wait", "skip" this save, or
      "drop" the oldest waiting snapshot
    - `keep`: which checkpoints stay; the others are removed after a newer one is committed
    - `schedule`: decides when `due` returns True
    - `budget`: bytes that all slots together may take (`"16GiB"`). With less than a snapshot, the
      end of it is copied, and the beginning is written while the trainer waits; StateError with
      `on_full="raise"`, and of several ranks with `replicate`
    - `bandwidth_limit`: bytes per second that background saves may write (`"500MiB"`)
    - `lazy`: `save_async` returns before the copy; `before_optimizer_step` waits for it
    - `on_event`: called with each Save and what has become of it, from one thread: "copied" (the
      snapshot is complete, nothing is durable), "committed" (durable and visible), "remote"
      (durable in the remote tier, too), "dropped" (or skipped) or "failed". No save
      waits for it; its errors are RuntimeWarnings. `close` waits for its calls, 10 s at most
    - `tiers`: `[Memory("8GiB"), Remote("s3://bucket/run")]`: snapshots wait in the memory, as
      many as fit it; checkpoints are copied to the remote tier in the background. The directory
      `location` is the local tier
    - `placement`: lets a save go to the remote tier directly, when that is faster
    - `offload`: an optimizer of iobench.offload, whose state is not written again: each save
      pins it, and `load` lets model and optimizer go on from there

    In a job of several ranks, the constructor is a call of all of them, and they save together:

    - `world`: "job", all ranks of the launcher's job; "alone", this process only
    - `replicate`: `Partner()`: other nodes keep copies of the snapshots in their memory
    - `writers_per_node`: how many ranks of a node write replicated state; None: all
    - `deadline_s`: how long a rank waits for the others, in seconds

    One Checkpointer at a time can use a directory. TargetError names the pid and host of the
    holder, or a directory that was removed or replaced. Object stores have no locks. A relative
    location is made absolute. What cannot be removed gives a RuntimeWarning.

    Use it from one thread. The next `save`, `save_async`, `wait` or `close` raises an error of the
    background; a failed save never becomes `committed`.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        writer: Writer | str = "hybrid",
        slots: int | None = None,
        on_full: WhenFull = "wait",
        keep: Retention | None = None,
        schedule: Schedule | None = None,
        budget: int | str | None = None,
        bandwidth_limit: int | str | None = None,
        lazy: bool = False,
        on_event: OnEvent | None = None,
        tiers: Sequence[AnyTier] = (),
        placement: Placement | None = None,
        offload: Any = None,
        world: AnyWorld = "job",
        replicate: Partner | None = None,
        writers_per_node: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """See the class. The constructor of a subclass calls this one with the options."""
        given = dict(locals())
        del given["self"]
        options = CheckpointerOptions(**given)
        self._schedule, self._pid = schedule, os.getpid()
        self._ranks = checkpointer_control(options.own_world, location, float(deadline_s))
        opened = Opening(options, self._ranks)
        self._store, self._tier, self._memory = opened.store, opened.tier, opened.memory
        self._persister, self._replicator = opened.persister, opened.replicator
        self._restoring, self._participant = opened.restoring, options.participant
        self._events = None if on_event is None else SaveEvents(on_event)
        self._saving = Saving(
            ranks=self._ranks,
            contents=opened.contents,
            committer=opened.committer,
            persister=opened.persister,
            ledger=opened.ledger,
            on_full="wait" if on_full == "raise" else on_full,
            lazy=lazy,
            restoring=opened.restoring,
            replicator=opened.replicator,
            events=self._events,
            tier=opened.tier,
            memory=opened.memory,
            participant=options.participant,
        )
        self._exports = _Exports(self._persister, opened.ledger) if opened.ledger else None
        self.loaded: Loaded | None = None
        """Step that the last `load` restored, and the damaged checkpoints that it skipped."""
        # `close` detaches it, so `alive` also says that this Checkpointer is open.
        self._unclosed = weakref.finalize(
            self,
            end_unclosed,
            self._pid,
            self._persister,
            partial(_ended, self._store, self._events),
        )
        self._unclosed.atexit = False
        interpreter_end.at_end(self, Checkpointer._at_end)
        self._start(opened.ledger)

    def _start(self, ledger: Ledger | None) -> None:
        """Begin to copy checkpoints to the remote tier, and to hold the participant's state."""
        if self._tier is not None:
            if self._events is not None:
                self._tier.drain.queue.on_durable = self._events.remote
            self._tier.drain.start(lambda: ledger.ages() if ledger else {})
        try:
            self._participant.start()
        except BaseException:
            self.close()
            raise

    @property
    def saves(self) -> tuple[Save, ...]:
        """The last 1,000 saves with their status, oldest first."""
        return tuple(self._saving.saves)

    @property
    def memory(self) -> tuple[TierUse, ...]:
        """The use of each memory tier now, fastest first, of this rank's share; empty without."""
        return self._memory.pool.use() if self._memory is not None else ()

    @property
    def replicas(self) -> tuple[Replicated, ...]:
        """Outcomes of the last 1,000 replications, oldest first; empty without `replicate`."""
        return () if self._replicator is None else tuple(self._replicator.replicas)

    def due(self, step: int) -> bool:
        """Return whether to save after `step`, by the schedule. Call it once after every step.

        In a job of several ranks, that of rank 0 decides.
        """
        if self._schedule is None:
            raise UsageError("due() needs a schedule: Checkpointer(..., schedule=Every(500))")
        own, ranks = self._schedule.due(step), self._ranks
        if not ranks.many or type(self._schedule) is Every:  # it depends on the steps alone
            return own
        return ranks.led("due", lambda: own)

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
        self._saving.prepare(state, wait=wait)

    def save_async(self, state: Any, step: int) -> Save:
        """Take a snapshot of `state`; a background thread writes it.

        On return the caller may change the state. With `lazy`, it may change numpy arrays and plain
        values at once, and tensors after `before_optimizer_step`. Nothing is durable yet: see the
        status of the Save, or call `wait`. Raises StateError for a state that cannot be saved or
        does not fit, UsageError for a step that is saved twice, and earlier errors of the
        background. After a UsageError nothing is copied. With a `budget` below the size of the
        state it waits until all but the budget is written, with `lazy` `before_optimizer_step`
        does.
        """
        self._check_usable()
        if interpreter_end.begun():  # a thread that starts now is not awaited
            return self.save(state, step)
        return self._started(self._saving.save_async(state, step))

    def save(self, state: Any, step: int) -> Save:
        """Write `state`. On return the checkpoint is durable and visible.

        Waits for background saves first. CPU tensors are written without a copy. Raises what
        `save_async` raises, and TransferError; then no part of the checkpoint is visible.
        """
        began_s = time.perf_counter()
        self.wait()
        return self._started(self._saving.save(state, step, began_s))

    def _started(self, save: Save) -> Save:
        if self._schedule:
            self._schedule.started(save)
        return save

    def before_optimizer_step(self) -> None:
        """Wait until the copy of a lazy save is complete. Then the tensors may change.

        Raises errors of the background. Raises StateError when a tensor changed during the copy;
        that checkpoint is not saved.
        """
        self._saving.finish_copy()
        self._persister.raise_failure()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, dropped or failed. Raise what failed.

        Replicas may still be on their way. With `until="remote"` wait also until every checkpoint
        is durable in the remote tier or dropped, in a call of all ranks. Raises the error of an
        attempt that fails meanwhile; the copies go on.
        """
        if until not in ("committed", "remote"):
            raise OptionError(f"until={until!r}: 'committed' or 'remote'")
        self._check_usable()
        with _then(self._persister.raise_failure):
            self._saving.finish()
        if until == "remote":
            if self._tier is None:
                raise UsageError('wait(until="remote") needs tiers=[Remote(...)]')
            self._tier.drain.wait()
        self._released()

    def _released(self) -> None:
        """Release what no checkpoint needs; warn of replicas that were not made."""
        self._participant.sweep()
        if self._replicator is not None:
            self._replicator.warn()

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        *,
        on_corrupt: OnCorrupt = "raise",
        like: Any = None,
        restore_mode: RestoreMode = "auto",
    ) -> Any:
        """Return the state of the checkpoint `step`, or of the newest one. Waits for saves first.

        Every byte is compared with its checksum. A damaged checkpoint raises DataMismatchError.
        With `on_corrupt="previous"` the newest undamaged checkpoint before it is restored instead,
        with a RuntimeWarning; `loaded` gives its step. `like` is a state of the expected structure:
        a checkpoint of another model raises StateMismatchError, which lists missing, unexpected and
        mis-shaped names. Only its top-level entries are compared. TargetError if there is no such
        checkpoint. Later ones stay until a save of the same step replaces them; from the next save
        on they count as older than all others.

        `restore_mode` of several ranks: with "all" each rank reads what it needs. With "broadcast"
        one of the ranks that need the same bytes reads them and passes them on, with "all-gather"
        each of them reads a part. "auto" measures the three on the first bytes.
        """
        check_restore_mode(restore_mode)
        self._check_usable()
        self._saving.finish()
        state, self.loaded = self._restoring.restore(step, on_corrupt, like, restore_mode)
        return state

    def resume(self, objects: Mapping[str, Stateful], *, on_corrupt: OnCorrupt = "raise") -> int:
        """Load the newest checkpoint into `objects`; return the step to go on with.

            first = ckpt.resume({"model": model, "optimizer": optimizer})
            for step in range(first, steps):

        It is the step after that of the checkpoint, and 0 when there is none yet: the same script
        begins a run and goes on with it. Each object gets `load_state_dict` of the entry that
        `save` had under its name. Modules are compared with the checkpoint before anything is
        loaded. In a job, a call of all ranks. Optimizers of DTensors (FSDP2) get their own shards,
        and need the module here too: their state is made first, so a parameter that never had a
        gradient raises StateMismatchError; use `load` for such a model. Raises what `load` raises,
        and StateMismatchError for a name that the checkpoint lacks; no object has changed then.
        """
        check_resumable(objects)
        if self.latest() is None:
            return 0
        like = expected_of(objects)
        state = self.load("latest", on_corrupt=on_corrupt, like=like or None)
        assert self.loaded is not None
        step = self.loaded.step
        resume_into(objects, state, str(self._store.locate(step)))
        return step + 1

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last, in any tier; None without one.

        In a job of several ranks a call of all of them: they get the same answer, so all of them
        may decide by it whether to call `load`. After `close` it asks no other rank, and returns
        what this one sees. Manifests that this Checkpointer read when it opened, or wrote, are not
        read again.
        """
        return self._restoring.latest(is_open=self._is_open)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, of all tiers, in ascending order.

        With `tiers`, in a job of several ranks, a call of all of them.
        """
        return self._restoring.steps(is_open=self._is_open)

    def export(self, step: int, out: str | Path, **options: Any) -> None:
        """Export the checkpoint `step` to `out` in the background; `options`: see iobench.export.

        It begins when the step is committed, and retention keeps the step meanwhile. `close` waits
        for it; the next `save`, `save_async`, `wait` or `close` raises what failed. Training goes
        on to save. In a job all ranks may call this; rank 0 writes.
        """
        self._check_usable()
        if self._exports is not None:
            save = next((one for one in reversed(self.saves) if one.step == step), None)
            source = self._store.locate(step)
            self._exports.begin(step, save, partial(_export, source, out, options))

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step` from all tiers. Waits for saves first.

        UsageError if there is none. With `tiers`, TransferError if the remote tier cannot be asked:
        nothing is removed then. In a job of several ranks, a call of all of them.
        """
        self._check_usable()
        self._saving.finish()
        self._restoring.remove(step)
        self._released()

    def close(self) -> None:
        """Wait for every save and export and for all ranks, free the memory, release the lock, and
        raise the first error.

        With `tiers`, wait also for the copies, unless the remote tier fails: a RuntimeWarning names
        the steps then, and the next Checkpointer of the directory goes on. An optimizer of
        `offload` stays open. A second call does nothing. When Ctrl-C interrupts the wait, the
        Checkpointer stays open.
        """
        if not self._is_open:
            return
        failures: list[Exception] = []
        with _noting(failures):
            self._saving.finish()
            self._participant.sweep()
        with _noting(failures):  # a filter may raise a warning
            if self._tier is not None:
                self._tier.drain.wait(failing=True)
        left = len(failures)
        with _noting(failures):
            self._ranks.barrier("close")
        if self._exports is not None:  # after the barrier: the other ranks need not wait
            self._exports.finish()
        try:
            if self._replicator is not None:
                self._replicator.close(finished=len(failures) == left)
        finally:
            with _then(partial(_raise_first, failures)):
                self._shut_down()

    def _shut_down(self) -> None:
        """Free and release everything, and raise what failed in the background."""
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
        if error is not None and self._ranks.many and self._is_open:
            # The other ranks may wait for this one elsewhere, and never come to `close`.
            self._saving.finish_copy()
            self._persister.wait()
            self._ranks.fail(error)
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"a checkpoint failed too: {failure!r}")

    def _at_end(self) -> None:
        try:
            if self._unclosed.alive:
                self._saving.finish()
                if self._exports is not None:
                    self._exports.finish()
        finally:
            # `detach`, not a call: weakref makes none after its own atexit function
            if self._unclosed.detach():
                end_unclosed(self._pid, self._persister, partial(_ended, self._store, self._events))

    @property
    def _is_open(self) -> bool:
        return self._unclosed.alive and os.getpid() == self._pid

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a Checkpointer does not work in a forked child; make one there")
        if not self._unclosed.alive:
            raise UsageError("this Checkpointer is closed")


class _Exports:
    """A thread that exports checkpoints; `persister` gets what fails, for the trainer."""

    def __init__(self, persister: Persister, ledger: Ledger) -> None:
        self._persister, self._ledger = persister, ledger
        channel: Channel[Callable[[], None]] = Channel(
            lambda: channel.serve(lambda run: run()),
            name="iobench-export",
            limit=1 << 30,
            lingers=False,
            daemon=False,
        )
        self._channel = channel

    def begin(self, step: int, save: Save | None, export: Callable[[], None]) -> None:
        """Call `export` of the checkpoint `step` when `save` is committed; keep it until then."""
        self._ledger.hold(step)
        self._channel.submit(Lease(partial(self._run, step, save, export)))

    def _run(self, step: int, save: Save | None, export: Callable[[], None]) -> None:
        try:
            if save is not None and save.wait() and save.status != "committed":
                raise UsageError(f"step {step} is {save.status}, so it is not exported")
            export()
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._persister.fail_export(step, error)
        finally:
            self._ledger.release(step)

    def finish(self) -> None:
        """Wait for all exports; the persister raises what failed."""
        self._channel.drain(despite_failure=True)


def _export(source: str | Path, out: str | Path, options: dict[str, Any]) -> None:
    from iobench.exports.export import export  # here: it takes time to import

    export(source, out, world="alone", **options)


@contextmanager
def _then(finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` after the block, also when that fails: its error is the one that is raised."""
    try:
        yield
    except Exception as error:
        try:
            finish()
        except Exception as other:  # noqa: BLE001 -- the saves failed because the engine did
            error.add_note(f"a save failed too: {other!r}")
        raise
    finish()


@contextmanager
def _noting(failures: list[Exception]) -> Iterator[None]:
    """Add an error of the block to `failures`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- `close` raises the first one at its end
        failures.append(error)


def _raise_first(failures: list[Exception]) -> None:
    if failures:
        raise failures[0]


def _ended(store: CheckpointStore, events: SaveEvents | None, failure: Exception | None) -> None:
    """Release the directory of a Checkpointer that was never closed, and report it."""
    problem = f"the Checkpointer of {store} was never closed"
    try:
        store.release()
        if failure is not None:
            interpreter_end.lost(f"{problem}, and a save had failed: {failure!r}")
        else:
            warnings.warn(problem, ResourceWarning, stacklevel=2)
    finally:
        # The garbage collector may call this in any thread, which must not wait.
        if events is not None and threading.current_thread() is threading.main_thread():
            events.end()
        elif events is not None:
            events.leave()
