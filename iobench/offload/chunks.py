"""ChunkBuffer: one chunk in memory. ChunkReader: checked reads in place."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np
import torch
import xxhash

from iobench.errors import DataMismatchError, TransferError
from iobench.formats.tensors import torch_dtype
from iobench.offload.files import StateEngine
from iobench.offload.layout import (
    BLOCK,
    NOWHERE,
    DataFile,
    GenerationRecord,
    ParameterPiece,
    StateLayout,
    check_slot,
    empty_rows,
)
from iobench.offload.store import GenerationStore
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter

_BUFFERS = 4


class ChunkBuffer:
    """The slot of one chunk in both files, as they are on storage: the kernel moves this memory."""

    def __init__(self, layout: StateLayout) -> None:
        """Raises OSError (ENOMEM)."""
        self._layout = layout
        self._memory = fresh_pages(layout.buffer_bytes, huge=True)
        self.chunk = 0
        self.fresh = True
        self.row: np.void = empty_rows(layout)[0]

    def begin(self, chunk: int, row: np.void) -> None:
        """Use the buffer for `chunk`, whose bytes are where `row` says, if it has any yet."""
        self.chunk, self.row = chunk, row
        self.fresh = int(row["slot"]) == NOWHERE
        if self.fresh:
            self._memory[:] = 0

    @property
    def state(self) -> Bytes:
        """The slot in the file `state`: header and fp32 tensors."""
        return self._memory[: self._layout.slot_bytes("state", self.chunk)]

    @property
    def header(self) -> Bytes:
        """The header of the slot."""
        return self._memory[:BLOCK]

    @property
    def payload(self) -> Bytes:
        """What follows the header, which its checksum covers."""
        return self.state[BLOCK:]

    @property
    def parameters(self) -> Bytes:
        """The slot in the file `parameters`."""
        start = len(self.state)
        return self._memory[start : start + self._layout.slot_bytes("parameters", self.chunk)]

    def tensors(self) -> list[torch.Tensor]:
        """The fp32 tensors of the chunk, in the order of the layout."""
        flat = torch.from_numpy(self.payload).view(torch.float32)
        return list(flat.split(self._layout.elements(self.chunk)))

    def slot(self, name: DataFile) -> Bytes:
        """The slot in this file."""
        return self.state if name == "state" else self.parameters

    def parameter(self, piece: ParameterPiece) -> torch.Tensor:
        """The values of `piece` in the slot of the file `parameters`, in their own dtype."""
        dtype = torch_dtype(self._layout.parameters[piece.parameter].dtype)
        size = (piece.end - piece.begin) * dtype.itemsize
        return torch.from_numpy(self.parameters[piece.bytes_at : piece.bytes_at + size]).view(dtype)


def digest_of(data: Bytes) -> int:
    """Return the XXH3 of `data`. Other threads run meanwhile."""
    state = xxhash.xxh3_64()  # the functions of one call hold the GIL before xxhash 4
    state.update(data.data)
    return state.intdigest()


class DamagedChunkError(DataMismatchError):
    """The bytes of a chunk differ from its checksum. `row` says where they are."""

    def __init__(self, message: str, chunk: int, row: np.void) -> None:
        self.chunk, self.row = chunk, row
        super().__init__(message)


class ChunkReader:
    """Reads chunks of one file into buffers, several at once. Used by one thread.

    `loaded(buffer)` is called for each one, checked, in the order of `start`.
    """

    def __init__(
        self,
        store: GenerationStore,
        name: DataFile,
        loaded: Callable[[ChunkBuffer], None],
    ) -> None:
        self._store, self._name, self._loaded = store, name, loaded
        self._file = store.file(name)
        self._engine = StateEngine(store.speed, writes=False)
        self._begun: deque[ChunkBuffer] = deque()
        self._complete: set[int] = set()

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        return len(self._engine)

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
            self._engine.move(self._file, buffer.slot(self._name), offset, done)
        self._deliver()

    def wait_one(self) -> None:
        """Wait until one piece has ended. Raises like `start`."""
        self._engine.wait_one()
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
                check_slot(self._file.path, buffer.header.tobytes(), row, buffer.chunk)
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

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._engine.close(error)


def read_chunks(
    store: GenerationStore,
    record: GenerationRecord,
    name: DataFile,
    deliver: Callable[[ChunkBuffer], None],
) -> None:
    """Read all chunks of a generation from one file: "parameters" is 2 of 14 bytes for 16-bit
    parameters.

    `deliver` gets each chunk, checked, in order; the buffer is used again after it returns. Raises
    DataMismatchError when a chunk differs from its checksum, TransferError.
    """
    count = store.layout.chunks

    def work(_: Blocks, __: Meter) -> None:
        free = [ChunkBuffer(store.layout) for _ in range(min(_BUFFERS, count))]

        def loaded(buffer: ChunkBuffer) -> None:
            deliver(buffer)
            free.append(buffer)

        with ChunkReader(store, name, loaded) as reader:
            for chunk, row in enumerate(record.rows):
                if int(row["slot"]) == NOWHERE:
                    raise DataMismatchError(f"{store.state.path}: chunk {chunk} was never written")
                while not free:
                    reader.wait_one()
                reader.start(free.pop(), chunk, row)
            while len(reader):
                reader.wait_one()

    # A thread of its own: Ctrl-C must not occur inside, and the caller only waits.
    try:
        run_workers(1, Blocks([(0, count)], count), work, Meter(), caller_waits=True)
    except OSError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError.wrap(error, "reading", store.file(name).path) from error
