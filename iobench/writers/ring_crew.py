"""RingCrew: one thread with a ring that writes the full blocks of a stream."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import Protocol, Self

from iobench.writers.crew import Crew
from iobench.writers.flight import OnComplete
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["BlocksInFlight", "RingCrew"]


class BlocksInFlight(Protocol):
    """What a crew asks of an InFlight, or of what stands for one."""

    def __len__(self) -> int: ...

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None: ...

    def wait_one(self) -> None: ...

    def drain(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class RingCrew(Crew):
    """`make_flight` is called in the crew's thread, to which the ring belongs.

    A block that comes while others are in flight is submitted when the next of them has ended: the
    faster the stream, the more are in flight.
    """

    def __init__(
        self,
        fd: int,
        *,
        pool: BlockPool,
        iodepth: int,
        make_flight: Callable[[Meter], BlocksInFlight],
    ) -> None:
        super().__init__(fd, pool=pool, threads=1, in_flight=iodepth)
        self._make_flight = make_flight
        self._kept: Bytes | None = None  # stays its caller's: to be written, not to be given away
        self._flying = 0
        self._dropped: list[Bytes] = []

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:  # noqa: ARG002
        self._kept = data
        self.submit(data, offset)
        self.settle()

    def _work(self, meter: Meter) -> None:
        try:
            with self._make_flight(meter) as flight:
                while (item := self._next(flight)) is not None:
                    if self._dropping:
                        self._let_go(item[0])
                    else:
                        self._launch(flight, *item)
                flight.drain()
                return
        except BaseException as error:  # noqa: BLE001 -- raised by submit and settle
            self._failure = error
        finally:
            meter.seconds.clear()  # beside the stream, whose own waiting is what took time
        # Only now, so that nobody takes what was dropped for written.
        for block in self._dropped:
            self._let_go(block)
        for _ in range(self._flying):  # a broken ring: what it may still use is never given away
            self._permits.release()
        while (item := self._queue.get()) is not None:
            self._let_go(item[0])

    def _next(self, flight: BlocksInFlight) -> tuple[Bytes, int] | None:
        """The next block to write; what is in flight goes on landing until there is one."""
        while len(flight):
            try:
                return self._queue.get_nowait()
            except Empty:
                flight.wait_one()
        return self._queue.get()

    def _launch(self, flight: BlocksInFlight, block: Bytes, offset: int) -> None:
        def landed(whole: bool) -> None:
            self._flying -= 1
            if whole:
                self._let_go(block)
            else:
                self._dropped.append(block)

        self._flying += 1
        flight.start(block, offset, len(block), landed)

    def _let_go(self, block: Bytes) -> None:
        if block is self._kept:
            self._permits.release()
        else:
            super()._let_go(block)
