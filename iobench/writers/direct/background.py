"""BackgroundWriter: writes full blocks of one file in the background, for streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from iobench.writers.blocks.channel import Channel, Lease, LeaseState
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.image import Bytes
from iobench.writers.local.direct_io import pwrite_direct
from iobench.writers.transfer import Meter

__all__ = ["BackgroundWriter", "BlocksInFlight", "OneAtATime"]


class BlocksInFlight(Protocol):
    """The writes in flight of one thread: an InFlight, or an object with the same methods."""

    def __len__(self) -> int: ...

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None: ...

    def wait_one(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class OneAtATime:
    """Writes each block past the page cache before `start` returns."""

    def __init__(self, fd: int, alignment: int, meter: Meter) -> None:
        self._fd, self._alignment, self._meter = fd, alignment, meter

    def __len__(self) -> int:
        return 0

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        with self._meter.phase("write"):
            calls = pwrite_direct(self._fd, data, offset, self._alignment)
        self._meter.count("direct", wanted, calls)
        on_complete(True)

    def wait_one(self) -> None:
        raise AssertionError("nothing is ever in flight")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _Block:
    data: Bytes
    offset: int
    of_pool: bool = True  # otherwise the caller owns it


class BackgroundWriter:
    """Writes blocks in `threads` threads. Each thread calls `begin` for its own BlocksInFlight.

    At most `in_flight` blocks are submitted and not yet written; beyond that `submit` waits. While
    the thread of a ring has blocks in flight, a new block starts when the next of them ends. A
    faster stream therefore has more blocks in flight. Threads start with the first block, so that
    small files need none.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        threads: int,
        in_flight: int,
        begin: Callable[[Meter], BlocksInFlight],
        ring: bool,
    ) -> None:
        """With `ring`, the result of `begin` is used only in a thread without signal handlers."""
        self._pool, self._begin, self._ring = pool, begin, ring
        self._meters: list[Meter] = []
        self._channel: Channel[_Block] = Channel(
            self._work,
            name="iobench-background",
            workers=threads,
            limit=in_flight,
            release=self._release,
        )

    def submit(self, block: Bytes, offset: int) -> None:
        """Take over `block` and write it at `offset`; then return it to the pool.

        Raises the failure of an earlier block; `block` does not return to the pool then.
        """
        self._channel.submit(Lease(_Block(data=block, offset=offset)))

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        """Write `data` before returning. Its length is a multiple of the alignment.

        The caller keeps the memory.
        """
        if self._ring:
            self._channel.submit(Lease(_Block(data=data, offset=offset, of_pool=False)))
            self.drain()
            return
        with self._begin(meter) as blocks:
            blocks.start(data, offset, len(data), lambda _: None)

    def drain(self) -> None:
        """Wait until no block is in flight. Raises the first failure of a block."""
        self._channel.drain()

    def shutdown(self, meter: Meter, *, drop: bool = False) -> None:
        """Wait for the submitted blocks, end the threads and add their counts to `meter`.

        With `drop`, blocks that no thread has begun are not written. Interrupts are raised after
        all threads have ended, as these use the descriptor until then. The garbage collector may
        run this call in one of these threads, which does not wait for itself: see `afterwards`.
        """
        self._channel.close(drop=drop)
        if self._meters:
            meter.absorb(self._meters)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call `call` once no thread uses the file any more: now, or in the last thread."""
        self._channel.afterwards(call)

    def _work(self) -> None:
        meter = Meter()
        self._meters.append(meter)
        blocks = self._begin(meter)
        try:
            with blocks:
                while (lease := self._channel.next(wait=not len(blocks))) or len(blocks):
                    if lease is None:
                        blocks.wait_one()
                    else:
                        self._start(blocks, lease)
                    del lease
        except BaseException as error:  # noqa: BLE001 -- raised by submit and drain
            self._channel.fail(error)  # first, so that no dropped block counts as written
        finally:
            # The stream's own meter counts the time that it waits for these threads.
            meter.seconds = {} if self._ring else {"write": meter.seconds.get("write", 0.0)}
        # If the end failed, the kernel may still use the memory of blocks in flight.
        self._channel.end_all(LeaseState.LOST if len(blocks) else LeaseState.FAILED)

    def _start(self, blocks: BlocksInFlight, lease: Lease[_Block]) -> None:
        def on_complete(whole: bool) -> None:
            if whole:
                self._channel.end(lease, LeaseState.DONE)

        data = lease.item.data
        blocks.start(data, lease.item.offset, len(data), on_complete)

    def _release(self, block: _Block) -> None:
        if block.of_pool:
            self._pool.give(block.data)
