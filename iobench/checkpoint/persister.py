"""Persister: writes snapshots in the background, one at a time."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from iobench import linux
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Channel, Lease, LeaseState, OnFull
from iobench.writers.device.cuda import cuda_device
from iobench.writers.image import Bytes

__all__ = ["Persister", "Snapshot", "end_unclosed"]

_NO_LIMIT = 1 << 30
_NICE = 10  # about a tenth of the CPU when training uses all of it

T = TypeVar("T")


@dataclass(kw_only=True)
class Snapshot(Generic[T]):
    """A save and its copy of the state; `content` describes the bytes in `memory`."""

    save: Save
    content: T
    slot: Slot | None = None

    @property
    def memory(self) -> Bytes:
        """Memory of the slot."""
        assert self.slot is not None
        return self.slot.memory


class Persister(Generic[T]):
    """Hands snapshots to a Channel, whose thread writes them with `persist`.

    A lease on a snapshot is the permit for one slot of `pool`: it is HELD from `take` to `submit`.
    The newest waiting snapshot is written next, and older ones are dropped. With `in_order=True`
    every snapshot is written, in order.

    `persist` writes one snapshot and raises on failure. It runs in a thread of low CPU and I/O
    priority, which ends when no snapshot waits. The end of the interpreter waits for this thread.
    After the interpreter began to end, `submit` starts no threads and writes in the caller.
    """

    def __init__(
        self, pool: SlotPool, persist: Callable[[Snapshot[T]], object], *, in_order: bool = False
    ) -> None:
        self.pool = pool
        self._persist, self._in_order = persist, in_order
        self._failures: list[BaseException] = []
        self._made_channel = self._new_channel()
        self._preparing: Channel[Callable[[], None]] | None = None

    @property
    def _channel(self) -> Channel[Snapshot[T]]:
        """The channel of this process. A forked child has no snapshot or thread of its parent."""
        if self._made_channel.forked:
            self._made_channel = self._new_channel()
        return self._made_channel

    def _new_channel(self) -> Channel[Snapshot[T]]:
        return Channel(
            self._work,
            name="iobench-persister",
            limit=self.pool.count,
            release=self._release,
            lingers=False,
            daemon=False,
            pick=None if self._in_order else self._choose,
        )

    def _choose(self, waiting: list[Lease[Snapshot[T]]]) -> list[Lease[Snapshot[T]]]:
        """Return the waiting snapshot to write next, and then those that stay. Oldest come first.

        It is the newest one; the others are dropped.
        """
        return waiting[-1:]

    def take(self, lease: Lease[Snapshot[T]], *, pinned: bool, on_full: OnFull = "wait") -> bool:
        """Give the snapshot a slot; return False when no slot is free and `on_full` is "skip".

        "wait" waits for a free slot. "supersede" takes the slot of the oldest waiting snapshot,
        which is then never written; without one it waits. `give` returns the slot, also after an
        exception in here. Raises StateError when the snapshot does not fit into memory.
        """
        self.pool.grow(lease.item.save.size_bytes)
        self._channel.limit = self.pool.count
        taken = self._channel.reserve(lease, on_full)
        if taken:
            lease.item.slot = self.pool.take(pinned=pinned)
        return taken

    def fit(self, lease: Lease[Snapshot[T]], *, pinned: bool) -> None:
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

    def give(self, lease: Lease[Snapshot[T]]) -> None:
        """Return the slot of the snapshot, unless it was submitted."""
        self._channel.give_back(lease)

    def submit(self, lease: Lease[Snapshot[T]]) -> None:
        """Write the snapshot in the background, at once or in its turn; then its slot is free.

        Raises RuntimeError when no thread can be started; then the caller keeps the slot.
        """
        lease.item.save.status = "waiting"
        try:
            if not interpreter_end.begun():
                self._channel.submit(lease)
                return
            self.wait()  # a signal handler may save while another save is being written
        except RuntimeError as error:
            if lease.state is not LeaseState.HELD or "interpreter shutdown" not in str(error):
                raise
        self._write(lease.item)
        self.give(lease)

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
        save.fail(error)
        self._failures.append(error)

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
        try:
            _lower_priority()
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._failures.append(error)

    def _write(self, snapshot: Snapshot[T]) -> None:
        try:
            self._persist(snapshot)
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self.fail(snapshot.save, error)

    def _release(self, snapshot: Snapshot[T]) -> None:
        """Called when the lease has ended; a snapshot that still waits was never written."""
        if snapshot.save.status == "waiting":
            failure = self._made_channel.failure
            if failure is None:
                snapshot.save.status = "superseded"
            else:
                snapshot.save.fail(failure)
        if snapshot.slot is not None:
            self.pool.give(snapshot.slot)


def end_unclosed(
    pid: int, persister: Persister[T], ended: Callable[[Exception | None], None]
) -> None:
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
