"""BackgroundSink: writes the blocks of a stream past the page cache, in the background."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeAlias

from iobench.errors import TransferError
from iobench.units import GIB
from iobench.writers.blocks.channel import Channel, Lease, LeaseState
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.engine import BlockingEngine, DirectEngine
from iobench.writers.direct.file import IoPath, PathFile
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.new_file import NewFile
from iobench.writers.stream import Sink
from iobench.writers.transfer import Meter

_RESERVE_STEP = GIB
_RESERVE_ROOM = 4 * _RESERVE_STEP  # with less free space, nothing is reserved ahead


_Lease: TypeAlias = "Lease[tuple[Bytes, int]]"
"""On a block and its offset."""


class BackgroundSink(Sink):
    """Writes blocks of `pool` in threads; each makes its own engine and writes by it.

    With `ring` there is one thread, whose engine has `depth` blocks in flight. Otherwise there are
    `depth` threads with one block each, and one more block waits. Beyond that `put` waits. While
    the thread of a ring has blocks in flight, a new block starts when the next of them ends. A
    faster stream therefore has more blocks in flight. Threads start with the first block, so that
    small files need none.
    """

    def __init__(
        self,
        file: PathFile,
        pool: BlockPool,
        depth: int,
        engine: Callable[[Meter], DirectEngine],
        meter: Meter,
        *,
        ring: bool,
        reserve: NewFile | None = None,
    ) -> None:
        """With `ring`, the engine is used only in a thread without signal handlers.

        What fills no block is written in the calling thread. `file` is closed once no thread uses
        it any more. Space of the new file `reserve`, whose size is unknown, is reserved in steps.
        """
        self._file, self._pool, self.block_size = file, pool, pool.block_size
        self._engine, self._meter = engine, meter
        self._reserve, self._reserved_to = reserve, 0
        self._meters: list[Meter] = []
        self._channel: Channel[tuple[Bytes, int]] = Channel(
            self._work,
            name="iobench-background",
            workers=1 if ring else depth,
            limit=depth if ring else depth + 1,
            release=lambda block: pool.give(block[0]),
        )

    def block(self) -> Bytes:
        return self._pool.take()

    def put(self, block: Bytes, offset: int) -> None:
        if self._reserve is not None and offset + len(block) > self._reserved_to:
            self._reserve = self._reserved_step(self._reserve)
        with self._meter.phase("write"):
            self._channel.submit(Lease((block, offset)))

    def _reserved_step(self, file: NewFile) -> NewFile | None:
        """Reserve a step more; return the file unless that was the last one."""
        # A fallocate that fails has taken all free space until then, also from other processes.
        room = os.fstatvfs(file.fd)
        if room.f_bavail * room.f_frsize < _RESERVE_ROOM:
            return None
        try:
            file.reserve(self._reserved_to, self._reserved_to + _RESERVE_STEP)
        except TransferError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            # Less than a step is free; the writes may still succeed.
            os.ftruncate(file.fd, self._reserved_to)
            return None
        self._reserved_to += _RESERVE_STEP
        return file

    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:  # noqa: ARG002
        with self._meter.phase("write"):
            self._channel.drain()
        if filled:
            here = BlockingEngine(self._pool, self._meter, path=IoPath.DIRECT)
            self._file.write(Extent.of(block[:filled], offset), here)

    def release(self, block: Bytes, *, failed: bool) -> None:
        """End the threads and add their counts to the meter of the stream.

        Interrupts are raised after all threads have ended, as these use the descriptor until then.
        The garbage collector may run this call in one of these threads, which does not wait for
        itself: see `afterwards`.
        """
        try:
            self._channel.close(drop=failed)
            if self._meters and self._channel.idle:  # else they are still counting
                self._meter.absorb(self._meters)
        finally:
            if len(block):
                self._pool.give(block)
            self.afterwards(self._file.close)

    def afterwards(self, call: Callable[[], None]) -> None:
        self._channel.afterwards(call)

    def _work(self) -> None:
        meter, returned = Meter(), list[_Lease]()
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
        except BaseException as error:  # noqa: BLE001 -- raised by put and drain
            self._channel.fail(error)  # first, so that no dropped block counts as written
        finally:
            # The stream's own meter counts the time that it waits for these threads.
            meter.seconds = {}
        for lease in returned:
            self._channel.end(lease, LeaseState.FAILED)
        # A ring that failed completes no other block: the kernel may still use their memory.
        self._channel.end_all(LeaseState.LOST)

    def _start(self, engine: DirectEngine, lease: _Lease, returned: list[_Lease]) -> None:
        """Start the write of a block; if it fails, the block is in `returned` once it is unused."""

        def on_complete(whole: bool) -> None:
            if whole:
                self._channel.end(lease, LeaseState.DONE)
            else:
                returned.append(lease)

        self._file.write(Extent.of(*lease.item), engine, on_complete)
