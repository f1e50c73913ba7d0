"""Channel: passes work to background threads and waits for it; no wait can hang.

A piece of work is a `Lease` on some memory. Callers submit it, workers take and end it:

    HELD ----submit----> QUEUED ----next----> RUNNING ----end----> DONE
      |                    |                     |
      | give_back          | dropped, or         | end after an error; LOST if
      |                    | after a failure     | its worker died before that
      v                    v                     v
    FAILED               FAILED                FAILED or LOST

A lease is outstanding from `reserve` or `submit` to its end. At most `limit` are: the entry in
`_outstanding` is the permit. Each lease ends once. Then `release` gets its memory; not that of a
LOST lease, which the kernel may still use.

A channel is open or closed; this is a state, not an item in the queue. The first failure is kept.
After it, and after `close(drop=True)`, queued leases end as FAILED without being worked on.

An exception may be raised at any point (Ctrl-C, a signal handler, MemoryError). The garbage
collector or a signal handler may enter a method while its thread is in another one. Therefore:

- The lock is reentrant, and each change of the state is one store or one call into C.
- `list` copies a collection in one step. `tuple` does not: it makes an object after it has begun,
  and the garbage collector of CPython 3.11 may run then.
- `with` takes the RLock itself. `__exit__` of a Condition is Python code: Ctrl-C at its first
  instruction leaves the lock locked.
- A wait checks its condition again after `_LOOK_AGAIN_S`: an interrupt may prevent a notification,
  or a handler may change the state between the check and the wait.
- A caller's wait (`_wait_until`) first calls `_recover`: begun leases of workers that died become
  LOST, other leases get a new worker, and what an interrupt left half done is finished.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

T = TypeVar("T")


class LeaseState(Enum):
    """The states of a lease, in order; it ends in one of the last three."""

    HELD = "held"
    """Owned by its maker, also while it is reserved."""
    QUEUED = "queued"
    """Submitted; no worker has begun it."""
    RUNNING = "running"
    """Owned by a worker."""
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """The worker ended before its work; the memory is never released."""


class Lease(Generic[T]):
    """One piece of work. When `submit` raises, the caller owns the lease if it is HELD."""

    __slots__ = ("item", "state", "worker")

    def __init__(self, item: T) -> None:
        self.item, self.state = item, LeaseState.HELD
        self.worker: Worker | None = None


OnFull = Literal["wait", "skip", "drop"]

_LOOK_AGAIN_S = 1.0

_lost: list[Any] = []
"""Leases on memory that the kernel may still use: kept forever."""

_PENDING = (LeaseState.QUEUED, LeaseState.RUNNING)
_ENDED = (LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)


class Channel(Generic[T]):
    """Runs `work` in up to `workers` threads; `work` takes leases by `next` or `serve`.

    - `limit` is the most leases that are outstanding, queued and running ones together.
    - `release` is called with the item of each lease that ends, except LOST ones.
    - With `lingers`, workers wait for more work until the channel is closed. Otherwise they end
      when nothing is queued, and `drain` waits for that.
    - A worker begins with the lease that it was started for. Then `pick` gets the queued leases,
      oldest first, and returns the next one and those that stay. The others end as FAILED.

    Threads start with the first leases. They do not refer to the user, so that it is collected.
    """

    def __init__(
        self,
        work: Callable[[], None],
        *,
        name: str,
        workers: int = 1,
        limit: int = 1,
        release: Callable[[T], None] | None = None,
        lingers: bool = True,
        daemon: bool = True,
        pick: Callable[[list[Lease[T]]], list[Lease[T]]] | None = None,
    ) -> None:
        self._work, self._name, self._max_workers, self.limit = work, name, workers, limit
        self._release, self._lingers, self._daemon, self._pick = release, lingers, daemon, pick
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._outstanding: dict[Lease[T], None] = {}  # in the order of reservation
        self._workers: dict[Worker, None] = {}
        self._threads: deque[Worker] = deque()  # to join: a worker leaves `_workers` before it ends
        self.failure: BaseException | None = None
        """The first failure; None if there is none. Set it to None to go on after a failure."""
        self._closed = self._dropping = False
        self._afterwards: deque[Callable[[], None]] = deque()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made the channel."""
        return os.getpid() != self._pid

    @property
    def idle(self) -> bool:
        """Whether no lease is outstanding and no worker is left."""
        return not self._outstanding and not self._working()

    # Called by the submitting side.

    def reserve(self, lease: Lease[T], on_full: OnFull = "wait") -> bool:
        """Make `lease` outstanding, so that `submit` finds room. Return whether it is.

        Without room, "skip" returns False. "drop" ends the oldest queued lease as FAILED, or
        waits. The lease stays HELD: `submit` or `give_back` follows, also after an exception here.
        """

        def ready() -> bool:
            full = len(self._outstanding) >= self.limit
            if full and on_full == "drop" and (queued := self._queued()):
                self.end(queued[0], LeaseState.FAILED)
            if len(self._outstanding) < self.limit:
                self._outstanding[lease] = None
            return lease in self._outstanding or on_full == "skip"

        self._wait_until(ready)
        return lease in self._outstanding

    def submit(self, lease: Lease[T]) -> None:
        """Submit `lease`: at once if it is reserved, otherwise once there is room.

        Raises the first failure. Raises RuntimeError if the channel is closed or no thread can be
        started. A reserved lease stays reserved then.
        """
        reserved = lease in self._outstanding
        try:
            self.reserve(lease)
            with self._lock:
                self._enqueue(lease)
        except BaseException:
            if lease.state is LeaseState.HELD and lease in self._outstanding and not reserved:
                self._remove(lease)
            raise

    def give_back(self, lease: Lease[T], *among: LeaseState) -> None:
        """End `lease` if its state is HELD, or one of `among`; its permit is free again."""
        self._end(lease, LeaseState.FAILED, among or (LeaseState.HELD,))

    def wait(self, lease: Lease[T]) -> None:
        """Wait until `lease` has ended. Raises the first failure."""
        self._wait_until(lambda: lease not in self._outstanding)

    def holds(self, lease: Lease[T]) -> bool:
        """Return whether `lease` is outstanding. Cleans up after a worker that died."""
        self._recover()
        return lease in self._outstanding

    def drain(self, *, despite_failure: bool = False) -> None:
        """Wait until no submitted lease is outstanding. Raises the first failure by default."""
        self._wait_until(self._drained, despite_failure=despite_failure)

    def close(self, *, drop: bool = False) -> None:
        """Accept no more leases, wait until all submitted ones have ended, and end the threads.

        Raises interrupts after that, and no failures. A worker of this channel, where the garbage
        collector may call it, does not wait: see `afterwards`. A forked child does nothing.
        """

        def end() -> None:
            with self._lock:
                self._dropping = self._dropping or drop
                self._closed = True
                self._changed.notify_all()
            if threading.current_thread() not in self._threads:
                self._wait_until(self._drained, despite_failure=True)
                for thread in list(self._threads):
                    if thread.ident is not None:
                        thread.join()

        if not self.forked:
            # `end` raises no Exception itself. A signal handler may: TimeoutError of an alarm.
            uninterrupted(end, (KeyboardInterrupt, SystemExit, Exception))

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call `call` once the channel is idle: now or in its last worker. A child calls it now."""
        # Not by the deque if idle: an ending worker could take it, and this would return first.
        now = self.forked
        if not now:
            with self._lock:
                now = self.idle
                if not now:
                    self._afterwards.append(call)
        if now:
            call()

    # Called by a worker.

    def next(self, *, wait: bool = True) -> Lease[T] | None:
        """Take the next lease, which is RUNNING then.

        Returns None when no lease is queued and the worker must end, or with `wait=False`.
        """
        while (lease := self._take(wait)) is not None:
            if self.failure is None and not self._dropping:
                return lease
            self.end(lease, LeaseState.FAILED)
        return None

    def serve(self, handle: Callable[[T], None]) -> None:
        """Call `handle` for one lease after the other; its exceptions are failures."""
        try:
            lease = self.next()
            while lease is not None:
                try:
                    handle(lease.item)
                    state = LeaseState.DONE
                except BaseException as error:  # noqa: BLE001 -- raised on the submitting side
                    self.fail(error)
                    state = LeaseState.FAILED
                following = self.next(wait=False)  # first, as `end` makes room for a newer lease
                self.end(lease, state)
                lease = following  # its memory must not be kept while this waits
                lease = lease or self.next()
        except BaseException as error:
            self.fail(error)
            self.end_all(LeaseState.FAILED)  # an interrupt may come just after `next` took one
            raise

    def fail(self, error: BaseException) -> None:
        """Record `error` if it is the first failure."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()

    def end(self, lease: Lease[T], state: LeaseState) -> None:
        """End `lease` as `state` and release its memory, if it has not ended yet."""
        self._end(lease, state, _PENDING)

    def end_all(self, state: LeaseState, worker: threading.Thread | None = None) -> None:
        """End the leases begun by `worker`, by default this thread. LOST is a failure."""
        worker = worker or threading.current_thread()
        for lease in list(self._outstanding):
            if lease.worker is worker and lease.state is LeaseState.QUEUED:
                lease.worker = None  # never begun: for another worker
            elif lease.worker is worker:
                if state is LeaseState.LOST:
                    self.fail(RuntimeError(f"{self._name}: a thread ended before its work"))
                self.end(lease, state)
                self._remove(lease)  # also if an interrupt ended `end` early

    # Waits, and what they first clean up.

    def _drained(self) -> bool:
        """Whether no submitted lease is outstanding; then no worker runs that does not linger."""
        held = all(lease.state is LeaseState.HELD for lease in list(self._outstanding))
        return held and (self._lingers or not self._working())

    def _wait_until(self, met: Callable[[], bool], *, despite_failure: bool = False) -> None:
        """Wait until `met()`. Unless `despite_failure`, stop at the first failure and raise it."""
        while True:
            if self.forked:
                raise RuntimeError(f"{self._name}: its threads are in the parent process")
            self._recover()
            with self._lock:
                failure = None if despite_failure else self.failure
                if failure is not None:
                    raise failure
                if met():
                    return
                self._pause()

    def _pause(self) -> None:
        try:
            self._changed.wait(_LOOK_AGAIN_S)
        except BaseException:
            # Condition.wait is Python code: Ctrl-C may come when it has just released the lock.
            try:
                self._changed.notify(0)  # raises if this thread does not own the lock
            except RuntimeError:
                self._lock.acquire()
            raise

    def _recover(self) -> None:
        """Clean up after dead workers, end leases that no worker may begin, start a worker."""
        for lease in list(self._outstanding):
            if lease.worker is not None and not lease.worker.working:
                self.end_all(LeaseState.LOST, lease.worker)
            elif lease.worker is None and lease.state in _ENDED:  # `end` was interrupted
                self._remove(lease)
        if self.failure is not None or self._dropping:
            for lease in self._queued():
                self._end(lease, LeaseState.FAILED, (LeaseState.QUEUED,))
        try:
            with self._lock:
                self._start_worker()
        except RuntimeError as error:  # no thread can be started
            if not self._working():
                self.fail(error)

    # The life of a lease.

    def _enqueue(self, lease: Lease[T]) -> None:
        if self._closed:
            raise RuntimeError(f"{self._name}: closed")
        try:
            lease.state = LeaseState.QUEUED
            lease.worker = self._start_worker()
            self._changed.notify_all()
        except BaseException:
            if lease.state is LeaseState.QUEUED:  # otherwise a handler let the worker begin it
                lease.worker, lease.state = None, LeaseState.HELD
            raise

    def _queued(self, worker: Worker | None = None) -> list[Lease[T]]:
        """Return the leases that wait for `worker`, or for any worker, in order."""
        wanted = LeaseState.QUEUED, worker
        return [one for one in list(self._outstanding) if (one.state, one.worker) == wanted]

    def _take(self, wait: bool) -> Lease[T] | None:
        with self._lock:
            return self._take_queued(wait)

    def _take_queued(self, wait: bool) -> Lease[T] | None:
        # Not inside the `with`: CPython 3.13 leaves a lock locked if a loop is interrupted there.
        me: Any = threading.current_thread()
        while not (queued := self._queued(me) or self._queued()):
            if self._closed or not wait:
                return None
            if not self._lingers:
                self._workers.pop(me, None)
                return None
            self._pause()
        if self._pick is not None and len(queued) > 1:
            found, queued = queued, self._pick(queued)
            for dropped in set(found) - set(queued):
                self.end(dropped, LeaseState.FAILED)
        queued[0].worker = me  # first: a RUNNING lease without a worker would never end
        queued[0].state = LeaseState.RUNNING
        return queued[0]

    def _end(self, lease: Lease[T], state: LeaseState, among: Sequence[LeaseState]) -> None:
        """End `lease` if its state is one of `among`, so that each lease ends once."""
        with self._lock:
            if lease.state not in among:
                return
            lease.state = state
        try:
            if state is LeaseState.LOST:
                _lost.append(lease)
            elif self._release is not None:
                self._release(lease.item)
        finally:
            self._remove(lease)

    def _remove(self, lease: Lease[T]) -> None:
        with self._lock:
            self._outstanding.pop(lease, None)
            self._changed.notify_all()
        self._call_afterwards()

    # The life of a worker.

    def _working(self) -> list[Worker]:
        return [worker for worker in list(self._workers) if worker.working]

    def _start_worker(self) -> Worker | None:
        """Start a worker if there is work for one more. Raises RuntimeError if it cannot start."""
        pending = [one for one in list(self._outstanding) if one.state in _PENDING]
        for dead in set(self._workers).difference(alive := self._working()):
            self._workers.pop(dead, None)
        if len(alive) < min(self._max_workers, len(pending)):
            worker = Worker(target=self._run, name=self._name, daemon=self._daemon)
            while self._threads and self._threads[0].over.is_set():
                self._threads.popleft()
            self._threads.append(worker)  # first, as an interrupted `start` may start it
            self._workers[worker] = None
            worker.start()
            return worker
        return None

    def _run(self) -> None:
        """Run `work` in a new thread, and leave nothing behind, whatever it raises."""
        try:
            try:
                if threading.current_thread() in self._workers:  # else it was given up
                    self._work()
            except BaseException as error:  # noqa: BLE001 -- raised on the submitting side
                self.fail(error)
            self._retire()
        except BaseException as error:  # noqa: BLE001 -- once more, after an interrupt
            self.fail(error)
            self._retire()
        self._recover()  # of queued leases, if no thread waits
        self._call_afterwards()

    def _retire(self) -> None:
        """End what this worker began and did not end; it is not a worker any more."""
        me: Any = threading.current_thread()
        self.end_all(LeaseState.LOST, me)
        with self._lock:
            self._workers.pop(me, None)
            self._changed.notify_all()

    def _call_afterwards(self) -> None:
        """Make the calls of `afterwards` if no lease is outstanding and no worker is left."""
        while True:
            with self._lock:
                if not self._afterwards or not self.idle:
                    return
                call = self._afterwards.popleft()
            call()
