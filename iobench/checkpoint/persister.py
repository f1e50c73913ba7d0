"""Persister: writes snapshots in the background, one at a time."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from iobench import linux
from iobench.checkpoint.content import Streamed
from iobench.checkpoint.ranked.messages import Turns
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.errors import StateError
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Channel, Lease, LeaseState, OnFull
from iobench.writers.device.cuda import cuda_device
from iobench.writers.image import Bytes

_LOOK_AGAIN_S = 1.0
_NO_LIMIT = 1 << 30
_NICE = 10  # about a tenth of the CPU when training uses all of it


@dataclass(kw_only=True)
class Snapshot:
    """A save and its copy of the state; `content` describes the bytes in `memory`."""

    save: Save
    content: Any
    slot: Slot | None = None
    streamed: Streamed | None = None
    """For a snapshot that is larger than its slot."""

    @property
    def memory(self) -> Bytes:
        """Memory of the slot."""
        assert self.slot is not None
        return self.slot.memory

    @property
    def begin(self) -> int:
        """The first byte of the file in `memory`; 0 if all of it is there."""
        return min(self.slot.begin, self.save.size_bytes) if self.slot is not None else 0

    @property
    def number(self) -> int:
        """Its number among the saves of all ranks."""
        return int(self.content.number)


Pick = Callable[[list[Lease[Snapshot]]], list[Lease[Snapshot]]]
"""Gets the waiting snapshots, oldest first. Returns the one to write next, then those that stay."""


def newest(waiting: list[Lease[Snapshot]]) -> list[Lease[Snapshot]]:
    """Write the newest snapshot next, and drop the others."""
    return waiting[-1:]


class Persister:
    """Hands snapshots to a Channel, whose thread writes them with `persist`.

    A lease on a snapshot is the permit for one slot of `pool`: it is HELD from `take` to `submit`.
    `pick` chooses what is written next; None: every snapshot, in order. In a job of several ranks
    all ranks have the same snapshots, and write the one that rank 0 picks: see `turns`. A snapshot
    that a rank cannot take is submitted without data, so that its save fails in all ranks.

    `persist` writes one snapshot and raises on failure. It runs in a thread of low CPU and I/O
    priority, which ends when no snapshot waits. The end of the interpreter waits for this thread.
    After the interpreter began to end, `submit` starts no threads and writes in the caller.
    """

    def __init__(
        self,
        pool: SlotPool,
        persist: Callable[[Snapshot], object],
        *,
        pick: Pick | None = newest,
        turns: Turns | None = None,
    ) -> None:
        self.pool = pool
        self._persist, self._turns = persist, turns
        self._pick = pick if turns is None or turns.leads else None
        self._failures: list[BaseException] = []
        self.failed: list[int] = []
        """Steps of the saves whose failure was not raised yet."""
        self._made_channel = self._new_channel()
        self._preparing: Channel[Callable[[], None]] | None = None

    @property
    def _channel(self) -> Channel[Snapshot]:
        """The channel of this process. A forked child has no snapshot or thread of its parent."""
        if self._made_channel.forked:
            self._made_channel = self._new_channel()
        return self._made_channel

    def _new_channel(self) -> Channel[Snapshot]:
        return Channel(
            self._work,
            name="iobench-persister",
            limit=self.pool.count,
            release=self._release,
            lingers=False,
            daemon=False,
            pick=None if self._pick is None else self._choose,
        )

    def _choose(self, waiting: list[Lease[Snapshot]]) -> list[Lease[Snapshot]]:
        assert self._pick is not None
        failed = next((one for one in waiting if one.item.save.error is not None), None)
        if failed is None:
            return self._pick(waiting)
        return [failed, *(one for one in waiting if one is not failed)]  # other ranks wait for it

    def take(self, lease: Lease[Snapshot], *, pinned: bool, on_full: OnFull = "wait") -> bool:
        """Give the snapshot a slot; return False when no slot is free and `on_full` is "skip".

        "wait" waits for a free slot. "drop" takes the slot of the oldest waiting snapshot,
        which is then never written; without one it waits. Rank 0 decides about both for all ranks.
        `give` returns the slot, also after an exception in here. Raises StateError when the
        snapshot does not fit into memory.
        """
        save = lease.item.save
        try:
            self._agree(save.size_bytes)
        except BaseException:  # it is raised in all ranks
            self.give_back(lease)
            raise

        def reserved(on_full: OnFull) -> bool:
            self.pool.grow(save.size_bytes)
            self._channel.limit = self.pool.count
            return self._channel.reserve(lease, on_full)

        if self._turns is None or on_full == "wait":
            taken = reserved(on_full)
        else:
            taken = self._turns.decided(lambda: reserved(on_full), self._drop)
            taken = taken and (self._turns.leads or reserved("wait"))
        if taken:
            lease.item.slot = self._slot_for(save, pinned=pinned)
        return taken

    def _slot_for(self, save: Save, *, pinned: bool) -> Slot:
        try:
            return self.pool.take(pinned=pinned, save=save)
        except StateError:
            if self._turns is not None or not self.pool.frees_more:
                raise
        # It has a permit, but the memory of one smaller snapshot is not enough, or the system gives
        # less than was counted: wait for all snapshots, and use their memory. Several ranks do not:
        # rank 0 may announce the snapshot that waits here.
        self.wait()
        return self.pool.take(pinned=pinned, save=save)

    def _agree(self, size_bytes: int) -> None:
        """Set the number of slots, where it depends on memory, to the lowest one of all ranks.

        So each rank has room for the same snapshots. Raises StateError in a rank where not a single
        snapshot fits, and RankError in the others. When the slots of a rank must grow, all ranks
        wait until nothing is in memory any more.
        """
        turns, pool = self._turns, self.pool
        if turns is None or pool.counts_alone:
            return
        counts = turns.agreed(lambda: None if pool.grows(size_bytes) else pool.counted(size_bytes))
        if None in counts:
            self.wait()
            counts = turns.agreed(lambda: pool.counted(size_bytes))
        pool.count = min(counts)

    def fit(self, lease: Lease[Snapshot], *, pinned: bool) -> None:
        """Make the slot of a snapshot large enough for its new size. Its contents may be lost.

        Raises StateError when the snapshot does not fit into memory.
        """
        snapshot = lease.item
        self.pool.grow(snapshot.save.size_bytes)
        assert snapshot.slot is not None
        self.pool.fit(snapshot.slot, pinned=pinned)

    def prepare(self, size_bytes: int, *, wait: bool, pinned: bool = False) -> None:
        """Allocate all free slots; a thread makes their pages. Raises StateError, OSError (ENOMEM).

        With `pinned` the thread pins them too. With `wait` it returns when they are made.
        `raise_failure` raises what failed.
        """
        self._agree(size_bytes)
        self.pool.grow(size_bytes)
        device = cuda_device(torch.device("cuda")) if pinned else None
        slots = self.pool.allocated()
        if self._preparing is None:
            channel: Channel[Callable[[], None]] = Channel(
                lambda: self._prepare(channel),
                name="iobench-prepare",
                limit=_NO_LIMIT,
                lingers=False,
            )
            self._preparing = channel
        for slot in slots:
            self._preparing.submit(Lease(partial(slot.make_ready, device)))
        if wait:
            self._preparing.drain(despite_failure=True)

    def free(self) -> None:
        """Free the memory of the free slots, and end the thread of `prepare`."""
        self.pool.free()
        if self._preparing is not None:
            self._preparing.close(drop=True)  # a page more at most: the slots are freed
            self._preparing = None

    def give(self, lease: Lease[Snapshot]) -> None:
        """Return the slot of the snapshot, unless it was submitted.

        With several ranks, one that this rank could not take is submitted: it fails in all ranks.
        """
        failed = lease.state is LeaseState.HELD and lease.item.save.error is not None
        if self._turns is None or not failed:
            self.give_back(lease)
            return
        self._turns.remember(lease)
        self._channel.submit(lease)

    def give_back(self, lease: Lease[Snapshot]) -> None:
        """Return the slot of the snapshot, unless it was submitted. All ranks do."""
        self._channel.give_back(lease)

    def submit(self, lease: Lease[Snapshot]) -> None:
        """Write the snapshot in the background, at once or in its turn; then its slot is free.

        Raises RuntimeError when no thread can be started; then the caller keeps the slot.
        """
        save = lease.item.save
        save.status = "waiting"
        if self._turns is not None:
            self._turns.remember(lease)
        try:
            if not interpreter_end.begun():
                self._channel.submit(lease)
                if self._turns is not None:
                    self._turns.arrived()
                return
            self.wait()  # a signal handler may save while another save is being written
        except RuntimeError as error:
            if lease.state is not LeaseState.HELD or "interpreter shutdown" not in str(error):
                raise
        if save.status == "waiting":  # else the thread has written it, as rank 0 announced it
            self._write(lease.item)
        self.give_back(lease)

    def _drop(self, number: int) -> None:
        assert self._turns is not None
        lease = self._turns.drop(number)
        if lease is not None:
            self._channel.give_back(lease, LeaseState.QUEUED)

    def wait_for(self, wait: Callable[[float], bool], lease: Lease[Snapshot]) -> None:
        """Call `wait(seconds)` until it returns True, or the snapshot has no slot any more."""
        while not wait(_LOOK_AGAIN_S) and self._channel.holds(lease):
            pass

    def wait(self) -> None:
        """Wait until nothing waits and nothing is written."""
        self._channel.drain(despite_failure=True)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` once no slot is taken, no snapshot waits and none is being written.

        The call happens at once, or in the thread that makes the persister idle. This method never
        waits, so any thread may use it, even one that takes part in a write.
        """
        self._channel.afterwards(call)

    def raise_failure(self) -> None:
        """Raise the errors of the background since the last call."""
        self.failed.clear()
        for channel in (self._channel, self._preparing):
            # Of the channel itself, which goes on after it was raised.
            if channel is not None and channel.failure is not None:
                self._failures.append(channel.failure)
                channel.failure = None
        failures = list(self._failures)
        if not failures:
            return
        for other in failures[1:]:
            failures[0].add_note(f"a later failure: {other!r}")
        try:
            raise failures[0]
        finally:  # after the raise: a Ctrl-C here has the failure as its context
            del self._failures[: len(failures)]

    def fail(self, save: Save, error: BaseException) -> None:
        """Record that `save` failed. The trainer's thread raises `error` later."""
        error.add_note(f"in the background, while step {save.step} was saved")
        self._failures.append(error)
        save.fail(error)

    def fail_export(self, step: int, error: BaseException) -> None:
        """Record that the export of a checkpoint failed, like `fail`."""
        error.add_note(f"in the background, while step {step} was exported")
        self._failures.append(error)
        self.failed.append(step)

    def _work(self) -> None:
        self._lower_priority()
        self._channel.serve(self._write)

    def _prepare(self, channel: Channel[Callable[[], None]]) -> None:
        self._lower_priority()
        channel.serve(self._make_ready)

    def _make_ready(self, make: Callable[[], None]) -> None:
        try:
            make()
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            error.add_note("in the background, while the memory of a slot was prepared")
            self._failures.append(error)

    def _lower_priority(self) -> None:
        """Lower the priority of the calling thread. Warn when the system does not allow it."""
        try:
            linux.yield_to_others(_NICE)
        except OSError as refused:
            text = f"checkpoints are written at the trainer's own priority ({refused})"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            except RuntimeWarning as error:  # of a filter; raised in the trainer's thread
                self._failures.append(error)

    def _write(self, snapshot: Snapshot) -> None:
        turns = self._turns
        try:
            if turns is None or turns.leads:
                self._persist(snapshot)
            else:
                self._follow(turns, snapshot)
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            if turns is None and snapshot.save.error is not None:
                snapshot.save.status = "failed"  # it was raised: save_async was interrupted
                return
            self.fail(snapshot.save, error)
            self.failed.append(snapshot.save.step)

    def _follow(self, turns: Turns, snapshot: Snapshot) -> None:
        """Write what rank 0 announces until it was this snapshot, or until that is dropped."""
        while not turns.is_dropped(snapshot.number):
            order = turns.announced()
            for number in order.gone:
                self._drop(number)
            if order.number == snapshot.number:
                self._persist(snapshot)
                return
            if not turns.is_dropped(snapshot.number):
                other = turns.submitted(order.number)
                self._write(other.item)
                self._channel.end(other, LeaseState.DONE)
        turns.forget(snapshot.number)
        if snapshot.save.error is None:
            snapshot.save.status = "dropped"

    def _release(self, snapshot: Snapshot) -> None:
        """Called when the lease has ended; a snapshot that still waits was never written."""
        if snapshot.save.status == "waiting":
            failure = self._made_channel.failure
            if failure is None:
                snapshot.save.status = "dropped"
            else:
                snapshot.save.fail(failure)
            if self._turns is not None:
                self._turns.lost(snapshot.number)
        if snapshot.streamed is not None:
            snapshot.streamed.end()
        if snapshot.slot is not None:
            self.pool.give(snapshot.slot)


def end_unclosed(pid: int, persister: Persister, ended: Callable[[Exception | None], None]) -> None:
    """Finish the saves of an object that was never closed; then call `ended` with their failure.

    The garbage collector may call this in any thread, even in the persister's own, which must not
    wait for itself. So only the main thread waits. Does nothing in a process that is not `pid`.
    """

    def end() -> None:
        persister.free()
        failure = None
        try:
            persister.raise_failure()
        except Exception as error:  # noqa: BLE001 -- no caller is left to raise it to
            failure = error
        ended(failure)

    if os.getpid() != pid:
        return
    if threading.current_thread() is threading.main_thread():
        persister.wait()
    persister.when_idle(end)
