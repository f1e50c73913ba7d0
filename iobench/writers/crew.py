"""Crew: writes full blocks of one file in the background, for streams."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod

from iobench.writers.direct_io import pwrite_direct
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter
from iobench.writers.waiting import Worker, end_workers
from iobench.writers.workers import BlockPool

__all__ = ["Crew", "ThreadCrew"]


class Crew(ABC):
    """At most `in_flight` blocks are in flight; `submit` waits for one of them beyond that.

    The threads start with the first block and know the crew, not who uses it: an abandoned stream
    is collected although its crew still waits for work.
    """

    def __init__(self, fd: int, *, pool: BlockPool, threads: int, in_flight: int) -> None:
        self._fd, self._pool = fd, pool
        self._meters = [Meter() for _ in range(threads)]
        self._threads: list[Worker] = []
        self._queue: queue.SimpleQueue[tuple[Bytes, int] | None] = queue.SimpleQueue()
        self._in_flight_limit = in_flight
        self._permits = threading.Semaphore(in_flight)
        self._failure: BaseException | None = None
        self._dropping = False

    def submit(self, block: Bytes, offset: int) -> None:
        """Take `block` over and write it at `offset`; it goes back to the pool afterwards.

        Raises what an earlier block's write raised; `block` is then lost to the pool.
        """
        if not self._threads:
            self._start()
        self._permits.acquire()
        if self._failure is not None:
            self._permits.release()
            raise self._failure
        self._queue.put((block, offset))

    @abstractmethod
    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        """Write `data`, a multiple of the alignment that stays the caller's, before returning."""

    def settle(self) -> None:
        """Wait until no block is in flight. Raises what a block's write raised."""
        for _ in range(self._in_flight_limit):
            self._permits.acquire()
        self._permits.release(self._in_flight_limit)
        if self._failure is not None:
            raise self._failure

    def dismiss(self, meter: Meter, *, drop: bool = False) -> None:
        """End the threads, once they have finished what was submitted; count it in `meter`.

        With `drop` what no thread has begun yet is not written. KeyboardInterrupt is raised when
        all have ended: the descriptor is theirs until then.
        """
        self._dropping = drop
        end_workers(self._threads, self._queue)
        if self._threads:
            meter.absorb(self._meters)

    @abstractmethod
    def _work(self, meter: Meter) -> None:
        """What each thread does: write what is queued until None is; raises nothing."""

    def _start(self) -> None:
        for meter in self._meters:
            thread = Worker(target=self._work, args=(meter,), name="iobench-crew", daemon=True)
            self._threads.append(thread)  # first: an interrupt may come when it has started
            thread.start()

    def _let_go(self, block: Bytes) -> None:
        self._pool.give(block)
        self._permits.release()


class ThreadCrew(Crew):
    """Each thread writes one block at a time, past the page cache, and one more block waits."""

    def __init__(self, fd: int, *, pool: BlockPool, threads: int, alignment: int) -> None:
        super().__init__(fd, pool=pool, threads=threads, in_flight=threads + 1)
        self._alignment = alignment

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        calls = pwrite_direct(self._fd, data, offset, self._alignment)
        meter.count("direct", len(data), calls)

    def _work(self, meter: Meter) -> None:
        while (item := self._queue.get()) is not None:
            block, offset = item
            try:
                if self._failure is None and not self._dropping:
                    with meter.phase("write"):
                        self.put(block, offset, meter)
            except BaseException as error:  # noqa: BLE001 -- raised by submit and settle
                self._failure = error
            finally:
                self._let_go(block)
