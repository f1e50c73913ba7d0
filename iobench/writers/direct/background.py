"""BackgroundWriter: writes full blocks of one file in the background, for streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from iobench.writers.blocks.channel import Channel, Lease, LeaseState
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.image import Bytes
from iobench.writers.local.direct_io import pwrite_direct
from iobench.writers.transfer import Meter

__all__ = ["BackgroundWriter", "BlocksInFlight", "OneAtATime"]


class BlocksInFlight(Protocol):
    """What a thread writes its blocks with: an InFlight, or an object that behaves like one."""

    def __len__(self) -> int: ...

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None: ...

    def wait_one(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class OneAtATime:
    """Writes each block before `start` returns, past the page cache."""

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
    of_pool: bool = True  # otherwise the caller's


class BackgroundWriter:
    """Each of `threads` writes blocks by what `begin` makes in that thread.

    At most `in_flight` blocks are submitted and not written; `submit` waits beyond that. A block
    that comes while a ring's thread has others in flight is started when the next of them has
    ended: the faster the stream, the more are in flight. Threads start with the first block, so
    that small files cost none.
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
        """`ring`: what `begin` makes may only be used in a thread that no signal handler enters."""
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
        """Take `block` over and write it at `offset`; it goes back to the pool afterwards.

        Raises what an earlier block's write raised; `block` is then lost to the pool.
        """
        self._channel.submit(Lease(_Block(data=block, offset=offset)))

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        """Write `data`, a multiple of the alignment that stays the caller's, before returning."""
        if self._ring:
            self._channel.submit(Lease(_Block(data=data, offset=offset, of_pool=False)))
            self.drain()
            return
        with self._begin(meter) as blocks:
            blocks.start(data, offset, len(data), lambda _: None)

    def drain(self) -> None:
        """Wait until no block is in flight. Raises what a block's write raised."""
        self._channel.drain()

    def shutdown(self, meter: Meter, *, drop: bool = False) -> None:
        """End the threads, once they have finished what was submitted; count it in `meter`.

        With `drop` what no thread has begun yet is not written. Interrupts are raised when all
        have ended: the descriptor is theirs until then. The collector may bring this call into one
        of these threads, which does not wait for itself: see `afterwards`.
        """
        self._channel.close(drop=drop)
        if self._meters:
            meter.absorb(self._meters)

    def afterwards(self, call: Callable[[], None]) -> None:
        """`call` once no thread uses the file any more: now, or in the last thread."""
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
            self._channel.fail(error)  # first, so that no dropped block is taken for written
        finally:
            # The stream waits while these threads write: its own clock counts that.
            meter.seconds = {} if self._ring else {"write": meter.seconds.get("write", 0.0)}
        # After an end that failed, the kernel may still use what is in flight.
        self._channel.end_mine(LeaseState.LOST if len(blocks) else LeaseState.FAILED)

    def _start(self, blocks: BlocksInFlight, lease: Lease[_Block]) -> None:
        def on_complete(whole: bool) -> None:
            if whole:
                self._channel.end(lease, LeaseState.DONE)

        data = lease.item.data
        blocks.start(data, lease.item.offset, len(data), on_complete)

    def _release(self, block: _Block) -> None:
        if block.of_pool:
            self._pool.give(block.data)
