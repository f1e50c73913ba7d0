"""read_slots: reads the slots of one generation, checks each, and passes it on."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from iobench.errors import DataMismatchError
from iobench.offload.files import StateFile
from iobench.offload.layout import BLOCK, DataFile
from iobench.offload.mover import Mover
from iobench.offload.record import NOWHERE, GenerationRecord
from iobench.offload.slots import digest_of
from iobench.offload.store import GenerationStore
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    import numpy as np

__all__ = ["read_parameters", "read_state"]

_BUFFERS = 4

_Deliver = Callable[[int, Bytes], None]
"""Gets a chunk and its checked bytes, which are overwritten after it returns."""


class _Slot(NamedTuple):
    chunk: int
    number: int
    size: int


def read_parameters(
    store: GenerationStore,
    record: GenerationRecord,
    deliver: _Deliver,
    *,
    iodepth: int,
    block_size: int,
) -> None:
    """Read the parameters of a generation: 2 of 14 bytes for 16-bit parameters.

    Raises DataMismatchError when a chunk differs from its checksum, TransferError.
    """

    def check(slot: _Slot, data: Bytes) -> None:
        _check(store.parameters, slot, data, record.rows[slot.chunk], "parameters")
        deliver(slot.chunk, data)

    layout = store.layout
    slots = (
        _Slot(chunk, number, layout.parameter_bytes(chunk))
        for chunk, number in _numbers(store, record)
    )
    _read(store, "parameters", slots, check, iodepth, block_size)


def read_state(
    store: GenerationStore,
    record: GenerationRecord,
    deliver: _Deliver,
    *,
    iodepth: int,
    block_size: int,
) -> None:
    """Read the fp32 tensors of a generation, without their headers. Raises like
    `read_parameters`."""

    def check(slot: _Slot, data: Bytes) -> None:
        row = record.rows[slot.chunk]
        store.check_slot(data[:BLOCK].tobytes(), row, slot.chunk)
        _check(store.state, slot, data[BLOCK:], row, "state")
        deliver(slot.chunk, data[BLOCK:])

    layout = store.layout
    slots = (
        _Slot(chunk, number, layout.state_bytes(chunk)) for chunk, number in _numbers(store, record)
    )
    _read(store, "state", slots, check, iodepth, block_size)


def _numbers(store: GenerationStore, record: GenerationRecord) -> Iterator[tuple[int, int]]:
    for chunk, row in enumerate(record.rows):
        if int(row["slot"]) == NOWHERE:
            raise DataMismatchError(f"{store.state.path}: chunk {chunk} was never written")
        yield chunk, int(row["slot"])


def _check(file: StateFile, slot: _Slot, data: Bytes, row: np.void, column: str) -> None:
    if digest_of(data) != int(row[column]):
        raise DataMismatchError(
            f"{file.path}: chunk {slot.chunk} differs from its checksum "
            f"(generation {int(row['written'])})"
        )


def _read(
    store: GenerationStore,
    name: DataFile,
    slots: Iterator[_Slot],
    check: Callable[[_Slot, Bytes], None],
    iodepth: int,
    block_size: int,
) -> None:
    """Read `slots` with several chunks in flight. All of it in one thread, whose ring it is."""

    layout = store.layout
    open_mover = functools.partial(Mover, writes=False, iodepth=iodepth, block_size=block_size)

    def work(_: Blocks, __: Meter) -> None:
        found = list(slots)
        largest = max(slot.size for slot in found)
        free = [fresh_pages(largest, huge=True) for _ in range(min(_BUFFERS, len(found)))]
        read: deque[tuple[_Slot, Bytes]] = deque()

        def deliver() -> None:
            while read:
                slot, memory = read.popleft()
                check(slot, memory[: slot.size])
                free.append(memory)

        reader = open_mover(store.file(name))
        offset_of = layout.state_offset if name == "state" else layout.parameter_offset
        try:
            for slot in found:
                while not free:
                    reader.wait_one()
                    deliver()
                memory = free.pop()
                done = functools.partial(_append_if, read, slot, memory)
                reader.start(memory[: slot.size], offset_of(slot.chunk, slot.number), done)
                deliver()
            while len(reader):
                reader.wait_one()
                deliver()
        finally:
            reader.close()

    # A thread of its own: Ctrl-C must not occur inside, and the caller only waits.
    count = store.layout.chunks
    run_workers(1, Blocks(0, count, count), work, Meter(), caller_waits=True)


def _append_if(read: deque[tuple[_Slot, Bytes]], slot: _Slot, memory: Bytes, ok: bool) -> None:
    """Completion callback of a read."""
    if ok:
        read.append((slot, memory))
