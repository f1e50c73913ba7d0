"""ChunkStream: reads chunk k+1 while the caller updates chunk k and chunk k-1 is written.

    storage --read--> loaded --update (caller)--> to write --write--> storage
                ^                                              |
                +-------------------- free buffers ------------+

Chunks reach the caller in the order of the pass. Each of the two threads has its rings, because a
ring belongs to one thread. The writing thread works in order, so the commit of a generation comes
before the first write of the next one: two slots for each chunk are enough, however far the caller
is ahead.

A pass may begin early, before it is known whether its step takes place. A chunk that was updated
early can be updated again from the same bytes: its early version is in a slot that no generation
uses.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from iobench.errors import TransferError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.chunks import ChunkReader, ChunkWriter, DamagedChunkError
from iobench.offload.model import AtOnce, ChunkPace
from iobench.offload.mover import Mover
from iobench.offload.record import GenerationRecord, Pin
from iobench.offload.store import Commit, GenerationStore
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ChunkStream"]

_LOOK_AGAIN_S = 1.0

Update = Callable[[ChunkBuffer], bool]
"""Works on one chunk in memory; returns whether it changed."""


_Work = Callable[[ChunkWriter], None]

_Read = tuple[int, "np.void | None"]
"""A chunk, and where to read it; None: from its newest place."""


class ChunkStream:
    """Passes over all chunks of the newest generation; writes the next one.

    One thread calls its methods. A failure of storage, of `update` or of a thread ends the stream:
    the call under way and every later one raise it, except `close`. What is durable stays so.
    """

    def __init__(
        self, store: GenerationStore, *, buffers: int, iodepth: int, block_size: int
    ) -> None:
        self._store = store
        self._open_mover = functools.partial(Mover, iodepth=iodepth, block_size=block_size)
        self._rows = store.first_rows()
        self._free: queue.SimpleQueue[ChunkBuffer | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[ChunkBuffer] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[Sequence[_Read] | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(ChunkBuffer(store.layout))
        self._changed = threading.Condition()
        self._stopping = False
        self._uncommitted = False
        """Whether a pass has ended that no commit has followed."""
        self._left: deque[int] | None = None
        """Chunks that are read for the pass and not updated yet; None: no pass has begun."""
        self._early: dict[int, np.void] = {}
        """Where the chunks were read from that have been updated early."""
        self._damage: DamagedChunkError | None = None
        self._unwritten: set[int] = set()
        """Chunks that are updated in memory and not yet in their new slot."""
        self._unfinished = 0
        """Commits and pins that are not durable yet."""
        self.failure: BaseException | None = None
        self.reported = False
        """Whether the failure was raised in the trainer's thread."""
        self._threads = [
            Worker(target=self._guarded, args=(work,), name=f"iobench-offload-{name}", daemon=True)
            for name, work in (("read", self._read_all), ("write", self._write_all))
        ]
        for thread in self._threads:
            thread.start()

    # Called by the trainer's thread, or for it by one other thread at a time.

    def run_early(
        self,
        update: Update,
        pace: ChunkPace,
        order: Sequence[int],
        *,
        generation: int,
        updates: int,
    ) -> None:
        """Call `update` for chunks of the next pass until `pace` stops it, and write the results.

        If no pass is being read yet, `order` is its order. `run` goes on after that.
        """
        with self._guarded_pass():
            self._begin(order)
            for chunk, row in self._updated(update, pace, generation=generation, updates=updates):
                self._early[chunk] = row

    def run(
        self,
        update: Update,
        *,
        generation: int,
        updates: int,
        pace: ChunkPace | None = None,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """Call `update` once for each chunk, and write the chunks that it changed.

        They belong to `generation`, which `commit` makes durable. Chunks that were updated early
        are done if they are in `early`; the others are read and updated again. Returns when the
        last chunk is updated; its write may go on. The next pass is read in the order `then`.
        """
        try:
            with self._guarded_pass():
                if self._uncommitted:  # Ctrl-C between a pass and its commit
                    raise RuntimeError("a step was interrupted")
                self._uncommitted = True
                every = range(self._store.layout.chunks)
                self._begin(every)
                self._read_again([chunk for chunk in self._early if chunk not in early])
                pace = pace or AtOnce()
                for _ in self._updated(update, pace, generation=generation, updates=updates):
                    pass
                assert not self._left
                self._left = None
                self._early.clear()
                self._begin(then or every)  # backward overlaps the next read
        except BaseException:
            self.reported = True
            raise

    @contextmanager
    def _guarded_pass(self) -> Iterator[None]:
        self.raise_failure()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            self.close()  # marks what is damaged
            raise

    def _begin(self, order: Sequence[int]) -> None:
        """Read the chunks of a pass in this order, unless one has begun."""
        if self._left is None:
            self._left = deque(order)
            self._to_read.put([(chunk, None) for chunk in order])

    def _read_again(self, chunks: Sequence[int]) -> None:
        assert self._left is not None
        self._left.extend(chunks)
        self._to_read.put([(chunk, self._early.pop(chunk)) for chunk in chunks])

    def _updated(
        self, update: Update, pace: ChunkPace, *, generation: int, updates: int
    ) -> Iterator[tuple[int, np.void]]:
        """Update chunks in their order; yield each, and where it was read from."""
        assert self._left is not None
        pace.plan(list(self._left))
        while self._left and pace.ready(self._left[0]):
            buffer = self._next_loaded()
            chunk, row = buffer.chunk, buffer.row
            assert chunk == self._left.popleft()
            if update(buffer):
                with self._changed:
                    self._unwritten.add(chunk)
                self._to_write.put(
                    functools.partial(
                        ChunkWriter.write, buffer=buffer, generation=generation, updates=updates
                    )
                )
            else:
                self._free.put(buffer)
            yield chunk, row

    def commit(self, commit: Commit) -> None:
        """Make the generation durable once its chunks are written. Waits for nothing."""
        self._submit(lambda writer: writer.commit(self._rows, commit))
        self._uncommitted = False

    def pin(self, pin: Pin, extra: bytes | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Pin the last committed generation. Waits for nothing."""
        self._submit(lambda _: self._store.pin(pin, extra, groups))

    def unpin(self, names: Collection[str]) -> None:
        """Release held pins, after all that was submitted. Waits for nothing."""
        self._submit(lambda _: self._store.unpin(names))

    def wait_for_pin(self, name: str) -> GenerationRecord | None:
        """Wait until the held pin is durable; return its record. For any thread.

        None when nothing more becomes durable: the stream has failed or ended.
        """
        with self._changed:
            while True:
                ended = self._stopping or self.failure is not None
                found = self._store.held(name)
                if found is not None or ended:
                    return found
                self._changed.wait(_LOOK_AGAIN_S)

    def _submit(self, work: Callable[[ChunkWriter], object]) -> None:
        def finish(writer: ChunkWriter) -> None:
            work(writer)
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

        self.raise_failure()
        with self._changed:
            self._unfinished += 1
        self._to_write.put(finish)

    def wait_for(self, met: Callable[[], bool]) -> None:
        """Wait until `met()`, which is checked after each commit and pin. Raises the failure."""
        with self._changed:
            while True:
                self.raise_failure()
                if met():
                    return
                self._changed.wait(_LOOK_AGAIN_S)

    def wait(self) -> None:
        """Wait until all that was submitted is durable."""
        self.wait_for(lambda: not self._unfinished and not self._unwritten)

    def raise_failure(self) -> None:
        """Raise the first failure as a TransferError, each time a new one."""
        if self.failure is None and not all(thread.working for thread in self._threads):
            self._fail(RuntimeError("a thread of it has ended"))
        failure = self.failure
        if failure is not None:
            self.reported = True
            text = (
                f"the offload engine has failed: {failure or type(failure).__name__}. What is "
                "durable is intact: continue with resume"
            )
            if isinstance(failure, OSError) and failure.errno:
                raise TransferError(failure.errno, text, failure.filename) from failure
            raise TransferError(text) from failure

    def is_own_thread(self) -> bool:
        """Whether the caller is one of the threads: the garbage collector may run in any."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Finish what was submitted, unless the stream has failed, and end the threads.

        Not for its own threads, which would wait for themselves.
        """

        def end() -> None:
            self._stopping = True
            self._to_read.put(None)
            self._to_write.put(None)
            self._free.put(None)
            for thread in self._threads:
                thread.join()

        uninterrupted(end)
        self._mark_damaged()

    def _mark_damaged(self) -> None:
        """Let `resume` pass over the generations that have the damaged chunk."""
        damage, self._damage = self._damage, None
        if damage is not None:
            for record in self._store.records():
                if record.rows[damage.chunk] == damage.row and not record.damaged:
                    self._store.mark_damaged(record)

    def _next_loaded(self) -> ChunkBuffer:
        while True:
            if isinstance(self.failure, Exception):
                raise self.failure
            self.raise_failure()
            try:
                return self._loaded.get(timeout=_LOOK_AGAIN_S)
            except queue.Empty:
                continue

    # The threads.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
                if isinstance(error, DamagedChunkError):
                    self._damage = error
            self._stopping = True
            self._changed.notify_all()
        self._free.put(None)  # a reader that waits for a buffer must not wait forever
        self._to_write.put(None)

    def _read_all(self) -> None:
        open_mover = functools.partial(self._open_mover, writes=False)
        with ChunkReader(self._store, "state", open_mover, self._loaded.put) as reader:
            while (chunks := self._to_read.get()) is not None:
                for chunk, row in chunks:
                    if not self._read(chunk, row, reader):
                        return
                while len(reader) and not self._stopping:
                    reader.wait_one()

    def _read(self, chunk: int, row: np.void | None, reader: ChunkReader) -> bool:
        """Begin to read `chunk` once a buffer is free; return False when the stream stops."""
        while (buffer := self._take_free(block=not len(reader))) is None:
            if self._stopping:
                return False
            reader.wait_one()
        with self._changed:
            while chunk in self._unwritten and not self._stopping:
                self._changed.wait(_LOOK_AGAIN_S)
            if row is None:
                row = self._rows[chunk].copy()
            else:  # an update that counts may leave the chunk as it was
                self._rows[chunk] = row
        if not self._stopping:
            reader.start(buffer, chunk, row)
        return not self._stopping

    def _take_free(self, *, block: bool) -> ChunkBuffer | None:
        try:
            return self._free.get(block=block)
        except queue.Empty:
            return None

    def _write_all(self) -> None:
        open_mover = functools.partial(self._open_mover, writes=True)
        with ChunkWriter(self._store, open_mover, self._written) as writer:
            while True:
                try:
                    work = self._to_write.get(block=not len(writer))
                except queue.Empty:
                    writer.wait_one()
                    continue
                if work is None or self.failure is not None:
                    return
                work(writer)

    def _written(self, buffer: ChunkBuffer, row: np.void) -> None:
        with self._changed:
            self._rows[buffer.chunk] = row
            self._unwritten.discard(buffer.chunk)
            self._changed.notify_all()
        self._free.put(buffer)
