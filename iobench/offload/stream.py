"""ChunkStream: reads chunk k+1 while the caller updates chunk k and chunk k-1 is written.

    storage --read--> loaded --update (caller)--> to write --write--> storage
                ^                                              |
                +-------------------- free buffers ------------+

Chunks reach the caller in their order. Each of the two threads has its rings, because a ring
belongs to one thread. The writing thread works in order, so the commit of a generation comes before
the first write of the next one: two slots for each chunk are enough, however far the caller is
ahead.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iobench.errors import TransferError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.loading import ChunkLoader, DamagedChunkError
from iobench.offload.mover import Mover
from iobench.offload.store import GenerationStore
from iobench.offload.writing import ChunkWriter, Commit
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ChunkStream"]

_LOOK_AGAIN_S = 1.0

Update = Callable[[ChunkBuffer], bool]
"""Works on one chunk in memory; returns whether it changed."""


_Work = Callable[[ChunkWriter], None]


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
        self._to_read: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(ChunkBuffer(store.layout))
        self._changed = threading.Condition()
        self._stopping = False
        self._uncommitted = False
        """Whether a pass has begun that no commit has ended."""
        self._ahead = False
        """Whether the next pass is being read already, as far as there are free buffers."""
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

    # Called by the trainer's thread.

    def run(self, update: Update, *, generation: int, updates: int) -> None:
        """Call `update` once for each chunk, and write the chunks that it changed.

        They belong to `generation`, which `commit` makes durable. Returns when the last chunk is
        updated; its write may go on.
        """
        self.raise_failure()
        try:
            if self._uncommitted:  # Ctrl-C between a pass and its commit
                raise RuntimeError("a step was interrupted")
            self._uncommitted = True
            if not self._ahead:
                self._to_read.put(range(self._store.layout.chunks))
            self._ahead = False
            for _ in range(self._store.layout.chunks):
                buffer = self._next_loaded()
                if not update(buffer):
                    self._free.put(buffer)
                    continue
                with self._changed:
                    self._unwritten.add(buffer.chunk)
                self._to_write.put(
                    functools.partial(
                        ChunkWriter.write, buffer=buffer, generation=generation, updates=updates
                    )
                )
            # Backward overlaps the next read.
            self._to_read.put(range(self._store.layout.chunks))
            self._ahead = True
        except BaseException as error:
            self._fail(error)
            self.reported = True
            self.close()  # marks what is damaged
            raise

    def commit(self, commit: Commit) -> None:
        """Make the generation durable once its chunks are written. Waits for nothing."""
        self._submit(lambda writer: writer.commit(self._rows, commit))
        self._uncommitted = False

    def pin(
        self,
        step: int,
        extra: bytes | None,
        groups: Sequence[Mapping[str, Any]],
        *,
        held: bool = False,
    ) -> None:
        """Pin the last committed generation. Waits for nothing."""
        self._submit(lambda _: self._store.pin(step, extra, groups, held=held))

    def unpin(self, extras: Collection[str]) -> None:
        """Release held pins, after all that was submitted. Waits for nothing."""
        self._submit(lambda _: self._store.unpin(extras))

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
        with ChunkLoader(self._store, open_mover, self._loaded.put) as loader:
            while (chunks := self._to_read.get()) is not None:
                for chunk in chunks:
                    if not self._read(chunk, loader):
                        return
                while len(loader) and not self._stopping:
                    loader.wait_one()

    def _read(self, chunk: int, loader: ChunkLoader) -> bool:
        """Begin to read `chunk` once a buffer is free; return False when the stream stops."""
        while (buffer := self._take_free(block=not len(loader))) is None:
            if self._stopping:
                return False
            loader.wait_one()
        with self._changed:
            while chunk in self._unwritten and not self._stopping:
                self._changed.wait(_LOOK_AGAIN_S)
            row = self._rows[chunk].copy()
        if not self._stopping:
            loader.start(buffer, chunk, row)
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
