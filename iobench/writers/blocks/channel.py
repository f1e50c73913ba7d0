"""Channel: hands work to background threads, and waits for it without ever hanging.

A piece of work is a `Lease` on some memory. Its states:

    HELD                 its maker's; also while `submit` waits for room
    QUEUED               submitted; no worker has begun it
    RUNNING              a worker's
    DONE, FAILED, LOST   ended, exactly once; LOST memory is never given back

A lease that has not ended is outstanding, which is its permit: at most `limit` are. So there is no
moment at which a permit is taken and nothing refers to it.

A channel is open, then closed: a state, not an item in the queue. The first failure stays. After
it, and after `close(drop=True)`, what is queued ends unbegun.

An exception may be raised at any point (Ctrl-C, a signal handler, MemoryError), and the collector
or a signal handler may enter any method of a channel that its thread is in. Therefore:

- The lock is reentrant, and each change of the state is one store or one call into C.
- `with` takes the RLock itself. A Condition's `__exit__` is Python code: Ctrl-C at its first
  instruction leaves the lock locked.
- A wait looks again after `_LOOK_AGAIN_S`: the thread that should notify may have been interrupted
  before it did, or the change came from a handler that ran between our look and our wait.
- Each look attends to workers that died: their leases are LOST, queued ones get a new worker.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

__all__ = ["Channel", "Lease", "LeaseState"]

_LOOK_AGAIN_S = 1.0

_lost: list[Any] = []
"""Leases on memory that the kernel may still use."""

T = TypeVar("T")


class LeaseState(Enum):
    """LeaseState of a lease; see the module."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


_PENDING = (LeaseState.QUEUED, LeaseState.RUNNING)
_ENDED = (LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)


class Lease(Generic[T]):
    """One piece of work. When `submit` raises, the lease is the caller's if it is HELD."""

    __slots__ = ("item", "state", "worker")

    def __init__(self, item: T) -> None:
        self.item = item
        self.state = LeaseState.HELD
        self.worker: Worker | None = None


class Channel(Generic[T]):
    """Up to `workers` threads each run `work`, which gets leases by `next`, or by `serve`.

    `release` takes back the memory of each submitted lease that ends, except LOST ones. Threads
    start with the first leases. They refer to the channel, not to the object that uses it, so that
    an abandoned one is collected. With `lingers` they wait for more work until the channel is
    closed; otherwise they end when nothing is queued.
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
    ) -> None:
        self._work, self._name, self._most, self._limit = work, name, workers, limit
        self._release, self._lingers, self._daemon = release, lingers, daemon
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._outstanding: dict[Lease[T], None] = {}  # in the order in which they came
        self._workers: dict[Worker, None] = {}
        self._threads: deque[Worker] = deque()  # to be joined: a worker retires just before its end
        self._failures: list[BaseException] = []
        self._closed = self._dropping = False
        self._afterwards: deque[Callable[[], None]] = deque()

    # What the submitting side calls.

    @property
    def failure(self) -> BaseException | None:
        """The first failure; None while nothing has failed."""
        return self._failures[0] if self._failures else None

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failures:
            raise self._failures[0]

    def submit(self, lease: Lease[T]) -> None:
        """Hand `lease` over, once there is room.

        Raises the first failure; RuntimeError: closed, or no thread can be started.
        """

        def entered() -> bool:
            if len(self._outstanding) < self._limit and not self._failures:
                self._outstanding[lease] = None
            return lease in self._outstanding

        self._check_process()
        try:
            self._until(entered)
            self.raise_failure()
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{self._name}: closed")
                lease.state = LeaseState.QUEUED
                self._staff()
                self._changed.notify_all()
        except BaseException:
            with self._lock:
                if lease.state is LeaseState.QUEUED:
                    lease.state = LeaseState.HELD
            if lease.state is LeaseState.HELD:
                self._forget(lease)
                self._call_afterwards()
            raise

    def wait(self, lease: Lease[T]) -> None:
        """Wait until `lease` has ended. Raises the first failure."""
        self._check_process()
        self._until(lambda: lease not in self._outstanding)
        self.raise_failure()

    def drain(self) -> None:
        """Wait until no submitted lease is outstanding. Raises the first failure."""
        self._check_process()
        self._until(self._drained)
        self.raise_failure()

    def close(self, *, drop: bool = False) -> None:
        """Admit no more leases, wait until the submitted ones have ended, and end the threads.

        Interrupts are raised after that; failures are not raised. One of its own workers, into
        which the collector may bring this call, does not wait: see `afterwards`. In a forked child
        this does nothing, as threads and leases are the parent's.
        """

        def end() -> None:
            with self._lock:
                self._dropping = self._dropping or drop
                self._closed = True
                self._changed.notify_all()
            if threading.current_thread() not in self._threads:
                self._until(self._drained, despite_failure=True)
                for thread in tuple(self._threads):
                    if thread.ident is not None:
                        thread.join()

        if os.getpid() == self._pid:
            # `end` raises no Exception of its own: a handler did, such as TimeoutError of an alarm.
            uninterrupted(end, (KeyboardInterrupt, SystemExit, Exception))

    def afterwards(self, call: Callable[[], None]) -> None:
        """`call` when nothing is outstanding and no worker is left: now, or in the last worker.

        Now in a forked child, which has neither.
        """
        if os.getpid() != self._pid:
            call()
            return
        self._afterwards.append(call)
        self._call_afterwards()

    # What a worker calls.

    def next(self, *, wait: bool = True) -> Lease[T] | None:
        """The next lease, RUNNING; None when none is queued and none is to be waited for."""
        while (lease := self._take(wait)) is not None:
            if not self._failures and not self._dropping:
                return lease
            self.end(lease, LeaseState.FAILED)
        return None

    def serve(self, handle: Callable[[T], None]) -> None:
        """`handle` one lease after the other, for a worker; what it raises is a failure."""
        try:
            while (lease := self.next()) is not None:
                try:
                    handle(lease.item)
                except BaseException as error:  # noqa: BLE001 -- raised on the submitting side
                    self.fail(error)
                    self.end(lease, LeaseState.FAILED)
                else:
                    self.end(lease, LeaseState.DONE)
                del lease  # its memory would be kept while this waits for the next
        except BaseException as error:
            self.fail(error)
            self.end_mine(LeaseState.FAILED)  # `next` took it, and was interrupted
            raise

    def fail(self, error: BaseException) -> None:
        """Note `error`, unless something has failed before."""
        with self._lock:
            if not self._failures:
                self._failures.append(error)
            self._changed.notify_all()

    def end(self, lease: Lease[T], state: LeaseState) -> None:
        """End `lease` as `state`; nothing happens to one that has ended."""
        with self._lock:
            if lease.state in _ENDED:
                return
            lease.state = state
        self._give_back(lease)

    def end_mine(self, state: LeaseState) -> None:
        """End every lease of the calling worker; one that is LOST is a failure."""
        self._end_all_of(threading.current_thread(), state)

    # Inside.

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._name}: its threads are in the parent process")

    def _drained(self) -> bool:
        return all(lease.state is LeaseState.HELD for lease in tuple(self._outstanding))

    def _until(self, met: Callable[[], bool], *, despite_failure: bool = False) -> None:
        """Wait for `met()`, or a failure."""
        while True:
            self._attend()
            with self._lock:
                if met() or (self._failures and not despite_failure):
                    return
                self._pause()

    def _pause(self) -> None:
        try:
            self._changed.wait(_LOOK_AGAIN_S)
        except BaseException:
            # Condition.wait is Python code too: Ctrl-C may come when it has just unlocked.
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.acquire()
            raise

    def _attend(self) -> None:
        """Do what dead workers left undone, and end what none is to begin."""
        for lease in tuple(self._outstanding):
            if lease.worker is not None and not lease.worker.working:
                self._end_all_of(lease.worker, LeaseState.LOST)
            elif lease.worker is None and lease.state in _ENDED:  # interrupted in `_withdraw`
                self._forget(lease)
        if self._failures or self._dropping:
            for lease in self._queued():
                self._withdraw(lease)
        try:
            with self._lock:
                self._staff()
        except RuntimeError as error:  # no thread can be started
            if not self._alive():
                self.fail(error)

    def _queued(self) -> list[Lease[T]]:
        return [lease for lease in tuple(self._outstanding) if lease.state is LeaseState.QUEUED]

    def _withdraw(self, lease: Lease[T]) -> None:
        """End a queued lease unbegun."""
        with self._lock:
            if lease.state is not LeaseState.QUEUED:
                return
            lease.state = LeaseState.FAILED
        self._give_back(lease)

    def _alive(self) -> list[Worker]:
        return [worker for worker in tuple(self._workers) if worker.working]

    def _staff(self) -> None:
        """Start a worker if there is work for one more."""
        pending = [one for one in tuple(self._outstanding) if one.state in _PENDING]
        for dead in set(self._workers).difference(alive := self._alive()):
            self._workers.pop(dead, None)
        if len(alive) < min(self._most, len(pending)):
            worker = Worker(target=self._run, name=self._name, daemon=self._daemon)
            while self._threads and self._threads[0].over.is_set():
                self._threads.popleft()
            self._threads.append(worker)  # before: it may run although `start` is interrupted
            self._workers[worker] = None
            worker.start()

    def _run(self) -> None:
        try:
            try:
                if threading.current_thread() in self._workers:  # else nobody knows of it any more
                    self._work()
            except BaseException as error:  # noqa: BLE001 -- raised on the submitting side
                self.fail(error)
            self._retire()
        except BaseException as error:  # noqa: BLE001 -- again, in case that was interrupted
            self.fail(error)
            self._retire()
        self._call_afterwards()

    def _retire(self) -> None:
        me: Any = threading.current_thread()
        self._end_all_of(me, LeaseState.LOST)
        with self._lock:
            self._workers.pop(me, None)
            self._changed.notify_all()

    def _end_all_of(self, worker: threading.Thread, state: LeaseState) -> None:
        for lease in tuple(self._outstanding):
            if lease.worker is worker:
                if state is LeaseState.LOST:
                    self.fail(RuntimeError(f"{self._name}: a thread ended before its work"))
                self.end(lease, state)
                self._forget(lease)  # also where `end` was interrupted before

    def _take(self, wait: bool) -> Lease[T] | None:
        me: Any = threading.current_thread()
        with self._lock:
            while not (queued := self._queued()):
                if self._closed or not wait:
                    return None
                if not self._lingers:
                    self._workers.pop(me, None)
                    return None
                self._pause()
            queued[0].worker = me  # first: a RUNNING lease of no worker would never end
            queued[0].state = LeaseState.RUNNING
            return queued[0]

    def _give_back(self, lease: Lease[T]) -> None:
        try:
            if lease.state is LeaseState.LOST:
                _lost.append(lease)
            elif self._release is not None:
                self._release(lease.item)
        finally:
            self._forget(lease)

    def _forget(self, lease: Lease[T]) -> None:
        with self._lock:
            self._outstanding.pop(lease, None)
            self._changed.notify_all()

    def _call_afterwards(self) -> None:
        """One call after the other, so that none is taken from the list and not called."""
        while True:
            with self._lock:
                if not self._afterwards or self._outstanding or self._alive():
                    return
                call = self._afterwards.popleft()
            call()
