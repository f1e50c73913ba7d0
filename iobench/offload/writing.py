"""ChunkWriter: what the writing thread of a stream does with chunks, commits and pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from iobench.offload.buffers import ChunkBuffer
from iobench.offload.files import StateFile
from iobench.offload.mover import Mover
from iobench.offload.record import ROW
from iobench.offload.slots import digest_of, slot_header
from iobench.offload.store import GenerationStore
from iobench.writers.direct.engine import CompletionLatch

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ChunkWriter", "Commit"]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a generation has besides its chunks."""

    generation: int
    updates: int
    counts: npt.NDArray[np.uint64]
    groups: Sequence[Mapping[str, Any]]
    began_s: float
    """When its first chunk was asked for, by time.monotonic."""


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

        with CompletionLatch(done) as latch:
            for mover, data, offset in (
                (self._state, buffer.state, layout.state_offset(chunk, slot)),
                (self._parameters, buffer.parameters, layout.parameter_offset(chunk, slot)),
            ):
                latch.add()
                mover.start(data, offset, latch.end)

    def commit(self, rows: npt.NDArray[np.void], commit: Commit) -> None:
        """Make the generation durable; `rows` say where its chunks are when all are written."""
        self._state.drain()
        self._parameters.drain()
        self._store.commit(
            rows,
            generation=commit.generation,
            updates=commit.updates,
            counts=commit.counts,
            groups=commit.groups,
            began_s=commit.began_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._state.close()
        finally:
            self._parameters.close()
