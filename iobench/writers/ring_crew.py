"""RingCrew: one thread with a ring that writes the full blocks of a stream."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty

from iobench.writers.crew import Crew
from iobench.writers.flight import Flight
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["RingCrew"]


class RingCrew(Crew):
    """`make_flight` is called in the crew's thread, to which the ring belongs.

    A block that comes while others are in flight is submitted when the next of them has ended: the
    faster the stream, the more are in flight.
    """

    def __init__(
        self, fd: int, *, pool: BlockPool, iodepth: int, make_flight: Callable[[Meter], Flight]
    ) -> None:
        super().__init__(fd, pool=pool, threads=1, in_flight=iodepth)
        self._make_flight = make_flight
        self._kept: Bytes | None = None  # the caller's own, to be written but not to be given away

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:  # noqa: ARG002
        self._kept = data
        try:
            self.submit(data, offset)
            self.settle()
        finally:
            self._kept = None

    def _work(self, meter: Meter) -> None:
        try:
            with self._make_flight(meter) as flight:
                while (item := self._next(flight)) is not None:
                    self._launch(flight, *item)
                flight.land_all()
                return
        except BaseException as error:  # noqa: BLE001 -- raised by submit and settle
            self._failure = error
        while (item := self._queue.get()) is not None:
            self._let_go(item[0])

    def _next(self, flight: Flight) -> tuple[Bytes, int] | None:
        """The next block to write; what is in flight goes on landing until there is one."""
        while len(flight):
            try:
                return self._queue.get_nowait()
            except Empty:
                flight.land()
        return self._queue.get()

    def _launch(self, flight: Flight, block: Bytes, offset: int) -> None:
        flight.start(block, offset, len(block), lambda _whole: self._let_go(block))

    def _let_go(self, block: Bytes) -> None:
        if block is self._kept:
            self._permits.release()
        else:
            super()._let_go(block)
