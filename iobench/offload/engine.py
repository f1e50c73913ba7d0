"""Engine: steps, commits and pins on one state directory. It reads chunk k+1 while the caller
updates chunk k and chunk k-1 is written.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iobench.errors import OptionError, TransferError, UsageError
from iobench.offload.chunks import ChunkBuffer, ChunkReader, DamagedChunkError, digest_of
from iobench.offload.files import Speed, StateEngine
from iobench.offload.layout import DATA_FILES, ROW, GenerationRecord, Pin, check_fits, slot_header
from iobench.offload.store import GenerationStore
from iobench.offload.update import ChunkUpdate, TrainerModel
from iobench.units import parse_size
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.direct.engine import CompletionLatch

if TYPE_CHECKING:
    import numpy.typing as npt

_LOOK_AGAIN_S = 1.0

Groups = Sequence[Mapping[str, Any]]

Update = Callable[[ChunkBuffer], bool]
"""Works on one chunk in memory; returns whether it changed."""

_Work = Callable[[StateEngine], object]

_Read = tuple[int, "np.void | None"]
"""A chunk, and where to read it; None: from its newest place."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much memory the engine may use, and how it reads and writes."""

    memory_bytes: int
    speed: Speed
    max_backlog: int

    @classmethod
    def parse(
        cls, memory: str | int, iodepth: int, block_size: str | int, max_backlog: int
    ) -> EngineOptions:
        """Raises OptionError for values out of range."""
        size = parse_size(block_size, "block_size")
        if not size or size % 4096:
            raise OptionError(f"block_size={block_size}: a multiple of 4096 bytes")
        if iodepth < 1:
            raise OptionError(f"iodepth={iodepth}: at least 1")
        if max_backlog < 0:
            raise OptionError(f"max_backlog={max_backlog}: 0 or more steps")
        return cls(
            memory_bytes=parse_size(memory, "memory"),
            speed=Speed(iodepth=iodepth, block_size=size),
            max_backlog=max_backlog,
        )


class Engine:
    """Passes over all chunks of the newest generation; writes the next one. It owns `store`.

    One thread calls its methods, and during backward one other thread `early`. A failure of
    storage, of an update or of a thread ends the engine: the call under way raises it, and each
    later one TransferError, except `close`. What is durable stays so.
    """

    def __init__(self, store: GenerationStore, options: EngineOptions, run: str) -> None:
        """`run`: see GenerationRecord. `store` is closed if this fails."""
        self.run = run
        self.store, self.options, self.layout = store, options, store.layout
        try:
            layout, base = store.layout, store.base
            buffers = min(layout.buffers(options.memory_bytes), max(2, layout.chunks))
            if buffers < 2:
                raise OptionError(f"memory={options.memory_bytes}: too small for two chunks")
            none = np.zeros(len(layout.parameters), dtype=np.uint64)
            self._counts = none if base is None else base.counts
            self.updates = 0 if base is None else base.updates
            """Steps of the trainer."""
            self._generation = store.last_generation
            self._scratch = torch.empty(layout.chunk_elements, dtype=torch.float32, device="cpu")
            self._rows = store.first_rows()
            self._free: queue.SimpleQueue[ChunkBuffer | None] = queue.SimpleQueue()
            for _ in range(buffers):
                self._free.put(ChunkBuffer(layout))
        except BaseException:
            store.close()
            raise
        self._loaded: queue.SimpleQueue[ChunkBuffer] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[Sequence[_Read] | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._uncommitted = False
        """Whether a pass has ended that no commit has followed."""
        self._left: deque[int] | None = None
        """Chunks that are read for the pass and not updated yet; None: no pass has begun."""
        self.updated_early: dict[int, np.void] = {}
        """Where the chunks were read from that `early` has updated, in this order."""
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

    # A step.

    def early(
        self,
        model: TrainerModel,
        groups: Groups,
        order: Sequence[int],
        ready: Callable[[int], bool],
    ) -> None:
        """Begin the next step: update chunks as long as the next one is `ready`.

        They come in the order that the last `step` was given, without one in `order`. Nothing of it
        counts before `step`. No other method may be called meanwhile.
        """
        with self._guarded_pass():
            self._begin(order)
            for chunk, row in self._updated(self._update(model, groups), ready):
                self.updated_early[chunk] = row

    def step(
        self,
        model: TrainerModel,
        groups: Groups,
        finish: Callable[[], None],
        *,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """Update the parameters that have a gradient; return when they are new and at most
        `max_backlog` steps are not durable.

        What `early` has updated counts for the chunks in `early` only: `model` gets no values of
        them, and those of all others. `finish` is called when they are new. The next step will
        have its chunks in the order `then`."""
        due = [model.has_gradient(index) for index in range(len(self._counts))]
        self.write_generation(
            self._update(model, groups),
            groups,
            self._counts + np.array(due, dtype=np.uint64),
            self.updates + 1,
            finish,
            early=early,
            then=then,
        )

    def _update(self, model: TrainerModel, groups: Groups) -> ChunkUpdate:
        counts = [int(count) for count in self._counts]
        return ChunkUpdate(self.layout, model, groups, counts, self._scratch)

    def write_generation(
        self,
        update: Update,
        groups: Groups,
        counts: npt.NDArray[np.uint64],
        updates: int,
        finish: Callable[[], None],
        *,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """Call `update` for each chunk, write those that it changed, and call `finish`.

        Chunks that were updated early are done if they are in `early`; the others are read and
        updated again. Waits as `max_backlog` asks. The next pass is read in the order `then`.
        """
        check_fits(self.layout, groups)
        try:
            with self._guarded_pass():
                if self._uncommitted:  # Ctrl-C between a pass and its commit
                    raise RuntimeError("a step was interrupted")
                self._uncommitted = True
                every = range(self.layout.chunks)
                self._begin(every)
                self._read_again([chunk for chunk in self.updated_early if chunk not in early])
                for _ in self._updated(update, lambda _: True, updates):
                    pass
                assert not self._left
                self._left = None
                self.updated_early.clear()
                self._begin(then or every)  # backward overlaps the next read
        except BaseException:
            self.reported = True
            raise
        # Ctrl-C before the commit is in the queue: the next step raises that this one was
        # interrupted. After it: the parameters and the counters are those of this step already.
        finish()
        self._generation, self._counts, self.updates = self._generation + 1, counts, updates
        record = GenerationRecord(
            generation=self._generation,
            updates=updates,
            rows=self._rows,
            counts=counts,
            groups=groups,
            run=self.run,
        )

        def commit(moves: StateEngine) -> None:
            moves.drain()
            self.store.commit(record)

        self._submit(commit)
        self._uncommitted = False
        reached = self._generation - self.options.max_backlog
        self._wait_for(lambda: self._durable_generation() >= reached)

    def _durable_generation(self) -> int:
        newest = self.store.newest
        return newest.generation if newest else 0

    @contextmanager
    def _guarded_pass(self) -> Iterator[None]:
        self.raise_failure()
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            self._fail(error)
            self._end_threads()  # marks what is damaged
            raise

    def _begin(self, order: Sequence[int]) -> None:
        """Read the chunks of a pass in this order, unless one has begun."""
        if self._left is None:
            self._left = deque(order)
            self._to_read.put([(chunk, None) for chunk in order])

    def _read_again(self, chunks: Sequence[int]) -> None:
        assert self._left is not None
        self._left.extend(chunks)
        self._to_read.put([(chunk, self.updated_early.pop(chunk)) for chunk in chunks])

    def _updated(
        self, update: Update, ready: Callable[[int], bool], updates: int | None = None
    ) -> Iterator[tuple[int, np.void]]:
        """Update chunks in their order while they are `ready`; yield each, and where it was read
        from. They are of the next generation, which has `updates`: one more without."""
        assert self._left is not None
        updates = self.updates + 1 if updates is None else updates
        generation = self._generation + 1
        while self._left and ready(self._left[0]):
            buffer = self._next_loaded()
            chunk, row = buffer.chunk, buffer.row
            assert chunk == self._left.popleft()
            if update(buffer):
                with self._changed:
                    self._unwritten.add(chunk)
                self._to_write.put(functools.partial(self._write, buffer, generation, updates))
            else:
                self._free.put(buffer)
            yield chunk, row

    def _next_loaded(self) -> ChunkBuffer:
        while True:
            if isinstance(self.failure, Exception):
                raise self.failure
            self.raise_failure()
            try:
                return self._loaded.get(timeout=_LOOK_AGAIN_S)
            except queue.Empty:
                continue

    # Pins, and what is durable.

    def pin(self, pin: Pin, extra: bytes, groups: Groups) -> None:
        """Pin the last generation with these values of the groups; waits for nothing."""
        if not self._generation:
            raise UsageError(f"step {pin.step}: nothing to pin before the first call of step()")
        check_fits(self.layout, groups, extra)
        self._submit(lambda _: self.store.pin(pin, extra, groups))

    def unpin(self, names: Collection[str]) -> None:
        """Release held pins, after all that was submitted. Waits for nothing."""
        self._submit(lambda _: self.store.unpin(names))

    def wait_for_pin(self, name: str) -> GenerationRecord | None:
        """Wait until the held pin is durable; return its record. For any thread.

        None when nothing more becomes durable: the stream has failed or ended.
        """
        with self._changed:
            while True:
                ended = self._stopping or self.failure is not None
                found = self.store.held(name)
                if found is not None or ended:
                    return found
                self._changed.wait(_LOOK_AGAIN_S)

    def _submit(self, work: _Work) -> None:
        def finish(moves: StateEngine) -> None:
            work(moves)
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

        self.raise_failure()
        with self._changed:
            self._unfinished += 1
        self._to_write.put(finish)

    def _wait_for(self, met: Callable[[], bool]) -> None:
        """Wait until `met()`, which is checked after each commit and pin. Raises the failure."""
        with self._changed:
            while True:
                self.raise_failure()
                if met():
                    return
                self._changed.wait(_LOOK_AGAIN_S)

    def wait(self) -> None:
        """Wait until all that was submitted is durable."""
        self._wait_for(lambda: not self._unfinished and not self._unwritten)

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

    # The end.

    def close(self) -> None:
        """Wait until all is durable, and release everything, also when that fails."""
        try:
            self.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release everything without an exception for what did not become durable.

        The garbage collector may call it in a thread of the engine, which cannot wait for itself.
        """
        if threading.current_thread() in self._threads:
            threading.Thread(target=self._release, name="iobench-offload-end").start()
        else:
            self._release()

    def _release(self) -> None:
        try:
            self._end_threads()
        finally:
            self.store.close()

    def _end_threads(self) -> None:
        """Finish what was submitted, unless the engine has failed, and end the threads."""

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
            for record in self.store.records():
                if record.rows[damage.chunk] == damage.row and not record.damaged:
                    self.store.mark_damaged(record)

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
        with ChunkReader(self.store, "state", self._loaded.put) as reader:
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
        with StateEngine(self.store.speed, writes=True) as moves:
            while True:
                try:
                    work = self._to_write.get(block=not len(moves))
                except queue.Empty:
                    moves.wait_one()
                    continue
                if work is None or self.failure is not None:
                    return
                work(moves)

    def _write(
        self, buffer: ChunkBuffer, generation: int, updates: int, moves: StateEngine
    ) -> None:
        """Begin to write a chunk to a free slot of both files. The next commit makes it durable."""
        chunk, store = buffer.chunk, self.store
        slot = store.free_slot(chunk)
        row: np.void = np.zeros(1, dtype=ROW)[0]
        row["slot"], row["written"] = slot, generation
        row["state"], row["parameters"] = digest_of(buffer.payload), digest_of(buffer.parameters)
        header = slot_header(chunk, generation, updates, int(row["state"]))
        buffer.header[:] = 0
        buffer.header[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        with CompletionLatch(functools.partial(self._written, buffer, row)) as latch:
            for name in DATA_FILES:
                offset = self.layout.offset(name, chunk, slot)
                moves.move(store.file(name), buffer.slot(name), offset, latch.part())

    def _written(self, buffer: ChunkBuffer, row: np.void, ok: bool) -> None:
        """Completion callback of a chunk: the kernel is done with it."""
        if not ok:
            return
        with self._changed:
            self._rows[buffer.chunk] = row
            self._unwritten.discard(buffer.chunk)
            self._changed.notify_all()
        self._free.put(buffer)
