"""BackgroundWriter: writes full blocks of one file in the background, for streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iobench.writers.blocks.channel import Channel, Lease, LeaseState
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.engine import DirectEngine, ignore
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.image import Bytes, Extent
from iobench.writers.transfer import Meter

__all__ = ["BackgroundWriter", "most_blocks"]


def most_blocks(depth: int) -> int:
    """Return the blocks of one stream: `depth` in flight, one that waits, one that is filled."""
    return depth + 2


@dataclass(frozen=True, kw_only=True)
class _Block:
    data: Bytes
    offset: int
    of_pool: bool = True  # otherwise the caller owns it


class BackgroundWriter:
    """Writes blocks of `pool` in threads; each makes its own engine and writes by it.

    With `ring` there is one thread, whose engine has `depth` blocks in flight. Otherwise there are
    `depth` threads with one block each, and one more block waits. Beyond that `submit` waits. While
    the thread of a ring has blocks in flight, a new block starts when the next of them ends. A
    faster stream therefore has more blocks in flight. Threads start with the first block, so that
    small files need none.
    """

    def __init__(
        self,
        pool: BlockPool,
        depth: int,
        engine: Callable[[Meter], DirectEngine],
        write: Callable[[DirectEngine, Extent, OnComplete], None],
        *,
        ring: bool,
    ) -> None:
        """With `ring`, the engine is used only in a thread without signal handlers."""
        self.pool = pool
        self._engine, self._write, self._ring = engine, write, ring
        self._meters: list[Meter] = []
        self._channel: Channel[_Block] = Channel(
            self._work,
            name="iobench-background",
            workers=1 if ring else depth,
            limit=depth if ring else depth + 1,
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
            with meter.phase("write"):
                self._channel.submit(Lease(_Block(data=data, offset=offset, of_pool=False)))
                self.drain()
            return
        with self._engine(meter) as engine:
            self._write(engine, Extent.of(data, offset), ignore)

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
        meter, returned = Meter(), list[Lease[_Block]]()
        self._meters.append(meter)
        engine = self._engine(meter)
        try:
            with engine:
                while (lease := self._channel.next(wait=not len(engine))) or len(engine):
                    if lease is None:
                        engine.wait_one()
                    else:
                        self._start(engine, lease, returned)
                    del lease
        except BaseException as error:  # noqa: BLE001 -- raised by submit and drain
            self._channel.fail(error)  # first, so that no dropped block counts as written
        finally:
            # The stream's own meter counts the time that it waits for these threads.
            meter.seconds = {}
        for lease in returned:
            self._channel.end(lease, LeaseState.FAILED)
        # A ring that failed completes no other block: the kernel may still use their memory.
        self._channel.end_all(LeaseState.LOST)

    def _start(
        self, engine: DirectEngine, lease: Lease[_Block], returned: list[Lease[_Block]]
    ) -> None:
        """Start the write of a block; if it fails, the block is in `returned` once it is unused."""

        def on_complete(whole: bool) -> None:
            if whole:
                self._channel.end(lease, LeaseState.DONE)
            else:
                returned.append(lease)

        self._write(engine, Extent.of(lease.item.data, lease.item.offset), on_complete)

    def _release(self, block: _Block) -> None:
        if block.of_pool:
            self.pool.give(block.data)
