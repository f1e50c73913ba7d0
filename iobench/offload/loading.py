"""ChunkLoader: what the reading thread of a stream does with chunks."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from iobench.errors import DataMismatchError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.files import StateFile
from iobench.offload.mover import Mover
from iobench.offload.slots import digest_of
from iobench.offload.store import GenerationStore

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ChunkLoader", "DamagedChunkError"]


class DamagedChunkError(DataMismatchError):
    """The bytes of a chunk differ from its checksum. `row` says where they are."""

    def __init__(self, message: str, chunk: int, row: np.void) -> None:
        self.chunk, self.row = chunk, row
        super().__init__(message)


class ChunkLoader:
    """Reads chunks into buffers, several at once. Used by one thread; see Mover.

    `loaded(buffer)` is called for each one, checked, in the order of `start`.
    """

    def __init__(
        self,
        store: GenerationStore,
        open_mover: Callable[[StateFile], Mover],
        loaded: Callable[[ChunkBuffer], None],
    ) -> None:
        self._store, self._loaded = store, loaded
        self._mover = open_mover(store.state)
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
            offset = self._store.layout.state_offset(chunk, int(row["slot"]))
            self._mover.start(buffer.state, offset, done)
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
        try:
            self._store.check_slot(buffer.header.tobytes(), row, buffer.chunk)
            if digest_of(buffer.payload) != int(row["state"]):
                raise DataMismatchError(
                    f"{self._store.state.path}: chunk {buffer.chunk} differs from its checksum "
                    f"(generation {int(row['written'])})"
                )
        except DataMismatchError as error:
            raise DamagedChunkError(str(error), buffer.chunk, row) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()
