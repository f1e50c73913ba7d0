"""Chunks between memory and the files of a state directory: checked reads, and writes in place."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import numpy as np

from iobench.errors import DataMismatchError
from iobench.offload.buffers import ChunkBuffer, digest_of, slot_header
from iobench.offload.files import StateFile
from iobench.offload.layout import DataFile
from iobench.offload.mover import Mover
from iobench.offload.record import NOWHERE, ROW, GenerationRecord
from iobench.offload.store import Commit, GenerationStore
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.direct.engine import CompletionLatch
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ChunkReader", "ChunkWriter", "DamagedChunkError", "read_chunks"]

_BUFFERS = 4


class DamagedChunkError(DataMismatchError):
    """The bytes of a chunk differ from its checksum. `row` says where they are."""

    def __init__(self, message: str, chunk: int, row: np.void) -> None:
        self.chunk, self.row = chunk, row
        super().__init__(message)


class ChunkReader:
    """Reads chunks of one file into buffers, several at once. Used by one thread; see Mover.

    `loaded(buffer)` is called for each one, checked, in the order of `start`.
    """

    def __init__(
        self,
        store: GenerationStore,
        name: DataFile,
        open_mover: Callable[[StateFile], Mover],
        loaded: Callable[[ChunkBuffer], None],
    ) -> None:
        self._store, self._name, self._loaded = store, name, loaded
        self._file = store.file(name)
        self._mover = open_mover(self._file)
        self._begun: deque[ChunkBuffer] = deque()
        self._complete: set[int] = set()

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        return len(self._mover)

    def start(self, buffer: ChunkBuffer, chunk: int, row: np.void) -> None:
        """Begin to read `chunk` from where `row` says, if storage has it.

        Raises DamagedChunkError and TransferError, possibly of an earlier chunk.
        """
        buffer.begin(chunk, row)
        self._begun.append(buffer)
        if buffer.fresh:
            self._done(chunk, ok=True)
        else:
            done = functools.partial(self._done, chunk)
            offset = self._store.layout.offset(self._name, chunk, int(row["slot"]))
            self._mover.start(buffer.slot(self._name), offset, done)
        self._deliver()

    def wait_one(self) -> None:
        """Wait until one piece has ended. Raises like `start`."""
        self._mover.wait_one()
        self._deliver()

    def _done(self, chunk: int, ok: bool) -> None:
        """Completion callback of a read."""
        if ok:
            self._complete.add(chunk)

    def _deliver(self) -> None:
        while self._begun and self._begun[0].chunk in self._complete:
            buffer = self._begun.popleft()
            self._complete.discard(buffer.chunk)
            if not buffer.fresh:
                self._check(buffer)
            self._loaded(buffer)

    def _check(self, buffer: ChunkBuffer) -> None:
        row = buffer.row
        data = buffer.parameters
        try:
            if self._name == "state":
                self._store.check_slot(buffer.header.tobytes(), row, buffer.chunk)
                data = buffer.payload
            if digest_of(data) != int(row[self._name]):
                raise DataMismatchError(
                    f"{self._file.path}: chunk {buffer.chunk} differs from its checksum "
                    f"(generation {int(row['written'])})"
                )
        except DataMismatchError as error:
            raise DamagedChunkError(str(error), buffer.chunk, row) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()


def read_chunks(
    store: GenerationStore,
    record: GenerationRecord,
    name: DataFile,
    deliver: Callable[[ChunkBuffer], None],
    *,
    iodepth: int,
    block_size: int,
) -> None:
    """Read all chunks of a generation from one file: "parameters" is 2 of 14 bytes for 16-bit
    parameters.

    `deliver` gets each chunk, checked, in order; the buffer is used again after it returns. Raises
    DataMismatchError when a chunk differs from its checksum, TransferError.
    """
    open_mover = functools.partial(Mover, writes=False, iodepth=iodepth, block_size=block_size)
    count = store.layout.chunks

    def work(_: Blocks, __: Meter) -> None:
        free = [ChunkBuffer(store.layout) for _ in range(min(_BUFFERS, count))]

        def loaded(buffer: ChunkBuffer) -> None:
            deliver(buffer)
            free.append(buffer)

        with ChunkReader(store, name, open_mover, loaded) as reader:
            for chunk, row in enumerate(record.rows):
                if int(row["slot"]) == NOWHERE:
                    raise DataMismatchError(f"{store.state.path}: chunk {chunk} was never written")
                while not free:
                    reader.wait_one()
                reader.start(free.pop(), chunk, row)
            while len(reader):
                reader.wait_one()

    # A thread of its own: Ctrl-C must not occur inside, and the caller only waits.
    run_workers(1, Blocks(0, count, count), work, Meter(), caller_waits=True)


class ChunkWriter:
    """Writes chunks to free slots of both files. Used by one thread; see Mover.

    `written(buffer, row)` is called when the kernel is done with the chunk; nothing is durable
    before the next `commit`.
    """

    def __init__(
        self,
        store: GenerationStore,
        open_mover: Callable[[StateFile], Mover],
        written: Callable[[ChunkBuffer, np.void], None],
    ) -> None:
        self._store, self._written = store, written
        self._state = open_mover(store.state)
        try:
            self._parameters = open_mover(store.parameters)
        except BaseException:
            self._state.close()
            raise

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        return len(self._state) + len(self._parameters)

    def wait_one(self) -> None:
        """Wait until one piece has ended."""
        (self._parameters if len(self._parameters) else self._state).wait_one()

    def write(self, buffer: ChunkBuffer, generation: int, updates: int) -> None:
        """Begin to write the chunk in `buffer` to a free slot."""
        chunk, layout = buffer.chunk, self._store.layout
        slot = self._store.free_slot(chunk)
        row: np.void = np.zeros(1, dtype=ROW)[0]
        row["slot"], row["written"] = slot, generation
        row["state"], row["parameters"] = digest_of(buffer.payload), digest_of(buffer.parameters)
        header = slot_header(chunk, generation, updates, int(row["state"]))
        buffer.header[:] = 0
        buffer.header[: len(header)] = np.frombuffer(header, dtype=np.uint8)

        def done(ok: bool) -> None:
            if ok:
                self._written(buffer, row)

        names: tuple[DataFile, DataFile] = "state", "parameters"
        with CompletionLatch(done) as latch:
            for mover, name in zip((self._state, self._parameters), names, strict=True):
                latch.add()
                mover.start(buffer.slot(name), layout.offset(name, chunk, slot), latch.end)

    def commit(self, rows: npt.NDArray[np.void], commit: Commit) -> None:
        """Make the generation durable; `rows` say where its chunks are when all are written."""
        self._state.drain()
        self._parameters.drain()
        self._store.commit(rows, commit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._state.close()
        finally:
            self._parameters.close()
