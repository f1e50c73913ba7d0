"""Mover: moves aligned memory to or from one file in place, many pieces in flight."""

from __future__ import annotations

from iobench.errors import transfer_errors
from iobench.offload.files import StateFile
from iobench.offload.rings import open_any_ring
from iobench.writers.direct.engine import CompletionLatch
from iobench.writers.direct.in_flight import InFlight, OnComplete
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter

__all__ = ["Mover"]


class Mover:
    """Writes to one file, or reads from one, by a ring of its own. Used by one thread.

    Each transfer is cut into pieces of `block_size` bytes, and at most `iodepth` are in flight. The
    kernel moves the memory itself: nothing is copied. `close` waits for all pieces in flight.
    """

    def __init__(self, file: StateFile, *, writes: bool, iodepth: int, block_size: int) -> None:
        self._file, self._iodepth, self._block_size = file, iodepth, block_size
        self._doing = "writing" if writes else "reading"
        self._meter = Meter()
        self._in_flight = InFlight(
            open_any_ring(iodepth),
            file.fd,
            writes=writes,
            alignment=file.alignment.offset,
            path="io_uring direct",
            meter=self._meter,
        )

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        return len(self._in_flight)

    def start(self, data: Bytes, offset: int, on_complete: OnComplete) -> None:
        """Move `data`, whole blocks, to or from `offset`; returns when the last piece has begun.

        `on_complete` is called when the kernel is done with all of `data`; its argument says
        whether it was moved. Raises TransferError, DataMismatchError, possibly of earlier data.
        """
        with transfer_errors(self._doing, self._file.path), CompletionLatch(on_complete) as latch:
            for begin in range(0, len(data), self._block_size):
                while len(self._in_flight) >= self._iodepth:
                    self._in_flight.wait_one()
                piece = data[begin : begin + self._block_size]
                latch.add()
                self._in_flight.start(piece, offset + begin, len(piece), latch.end)

    def wait_one(self) -> None:
        """Wait until one piece has ended. Raises like `start`."""
        with transfer_errors(self._doing, self._file.path):
            self._in_flight.wait_one()
        self._meter.completed.clear()  # grows with time otherwise

    def drain(self) -> None:
        """Wait until nothing is in flight. Raises like `start`."""
        while len(self):
            self.wait_one()

    def close(self) -> None:
        """Wait for all pieces in flight and close the ring."""
        self._in_flight.close()
