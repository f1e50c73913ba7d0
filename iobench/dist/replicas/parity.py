"""ParityReader: recovers a rank's pieces from the parity and the bytes of its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from iobench.dist.replicas.endpoint import Endpoint, described
from iobench.dist.replicas.pieces import PIECE, count_of, span_of
from iobench.dist.replicas.placement import chunk_bytes, chunk_of
from iobench.dist.replicas.recovery import RecoveryPlan
from iobench.dist.replicas.segment import Key, RankBytes
from iobench.errors import ReplicaError
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    from iobench.dist.replicas.fetch import Fetcher

__all__ = ["ParityReader"]

_AHEAD = 16
"""Pieces of one request: enough to hide the way of a request, with 16 MiB per member."""


class ParityReader:
    """The bytes of a lost member: its chunk of a parity, less the chunks of all others in it."""

    def __init__(
        self,
        fetcher: Fetcher,
        plan: RecoveryPlan,
        members: tuple[int, ...],
        rank: int,
        part: RankBytes,
        span: tuple[int, int],
    ) -> None:
        self._fetcher, self._plan, self._members = fetcher, plan, members
        self._lost = members.index(rank)
        self._part, self._end = part, span[1]
        self._chunk = chunk_bytes(part.size_bytes, len(members)) // PIECE
        self._sizes: dict[int, int] = {}
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._begin = 0

    def __enter__(self) -> Callable[[int, Bytes], None]:
        return self._read

    def __exit__(self, *_: object) -> None:
        pass

    def _read(self, number: int, piece: Bytes) -> None:
        if not self._begin <= number < self._begin + len(self._buffer) // PIECE:
            self._recover(number)
        at = (number - self._begin) * PIECE
        piece[:] = self._buffer[at : at + len(piece)]

    def _recover(self, number: int) -> None:
        """Recover pieces from `number` on: up to 16 of the same chunk."""
        chunk, first = divmod(number, self._chunk)
        # The inverse of `chunk_of`: whose parity contains this chunk of the lost member.
        holder = chunk if chunk < self._lost else chunk + 1
        count = min(_AHEAD, self._chunk - first, self._end - number)
        self._begin = number
        self._buffer = np.zeros(count * PIECE, np.uint8)
        node = self._plan.parity[self._members, holder]
        self._add(node, Key(self._members, holder), first, count, None)
        for other, rank in enumerate(self._members):
            if other not in (self._lost, holder):
                size = self._size_of(rank)
                own = chunk_bytes(size, len(self._members)) // PIECE
                begin = chunk_of(other, holder) * own + first
                end = min(begin + count, begin - first + own, count_of(size))
                if end > begin:
                    self._add(self._plan.holders[rank][0], Key((rank,)), begin, end - begin, size)

    def _size_of(self, rank: int) -> int:
        if rank not in self._sizes:
            self._sizes[rank] = self._fetcher.part(rank).size_bytes
        return self._sizes[rank]

    def _add(self, node: int, key: Key, begin: int, count: int, size: int | None) -> None:
        """XOR pieces of a segment of `size` bytes into the buffer; None: whole pieces."""
        start = begin * PIECE
        stop = start + count * PIECE if size is None else span_of(begin + count - 1, size)[1]
        found = _get(self._fetcher.endpoint(node), self._plan, key, start, stop)
        self._buffer[: len(found)] ^= found


def _get(endpoint: Endpoint, plan: RecoveryPlan, key: Key, start: int, stop: int) -> Bytes:
    wire = endpoint.wire
    wire.send({"op": "get", "start": start, "stop": stop, **described(key, plan.version)})
    _, length = wire.header()
    if length != stop - start:
        raise ReplicaError(f"{wire.other} sends {length} bytes, not {stop - start}")
    memory = np.empty(length, np.uint8)
    wire.take_into(memory)
    return memory
