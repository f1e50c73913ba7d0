"""Fetcher: reads a rank's bytes from the agents' memory and compares every piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from iobench.errors import ReplicaError
from iobench.ranks.messages import Message
from iobench.replicas.endpoint import Address, Endpoint, described
from iobench.replicas.pieces import digest_at, digest_of, pieces_of, span_of
from iobench.replicas.recovery import CopySource, RecoveryPlan
from iobench.replicas.segment import RankBytes
from iobench.writers.image import Bytes

__all__ = ["Fetched", "Fetcher"]


@dataclass(kw_only=True)
class Fetched:
    """What a fetch has read. `missing`: byte ranges of which no source has valid bytes.

    `read_bytes` counts by kind of source. `notes` says which source was replaced, and why.
    """

    read_bytes: dict[str, int] = field(default_factory=dict)
    missing: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Fetcher:
    """Reads the bytes of one plan. Use it from one thread; `close` ends its connections."""

    def __init__(
        self,
        plan: RecoveryPlan,
        *,
        node: int,
        local: Callable[[], Endpoint],
        remote: Callable[[Address], Endpoint],
        addresses: Mapping[int, Address],
    ) -> None:
        self._plan, self._node = plan, node
        self._local, self._remote, self._addresses = local, remote, addresses
        self._endpoints: dict[int | None, Endpoint] = {}
        self._files: dict[int, int] = {}
        self._parts: dict[int, RankBytes] = {}

    def part(self, rank: int) -> RankBytes:
        """Return size, digests and header of the bytes that `rank` saved. Raises ReplicaError."""
        if rank not in self._parts:
            reasons = []
            for source in self._plan.sources(rank, self._node):
                try:
                    self._parts[rank] = self._part_from(source, rank)
                    break
                except ReplicaError as error:
                    reasons.append(str(error))
            else:
                raise ReplicaError(
                    f"no agent describes the bytes of rank {rank}: {'; '.join(reasons)}"
                )
        return self._parts[rank]

    def _part_from(self, source: CopySource, rank: int) -> RankBytes:
        if source.kind == "storage":
            raise ReplicaError("only storage has them")
        part = self.endpoint(source.node).describe(rank, self._plan.version)
        part.check()
        return part

    def fetch(self, rank: int, start: int, memory: Bytes) -> Fetched:
        """Fill `memory` with the bytes of `rank` from `start` on.

        A piece whose digest differs, or that a source cannot give, comes from the next source.
        """
        part, found = self.part(rank), Fetched()
        stop = start + len(memory)
        if not 0 <= start <= stop <= part.size_bytes:
            raise ReplicaError(f"[{start}, {stop}) of {part.size_bytes} bytes of rank {rank}")
        first, last = pieces_of(start, stop)
        wanted = list(range(first, last))
        for source in self._plan.sources(rank, self._node):
            if not wanted or source.kind == "storage":
                break
            wanted = self._from(source, rank, part, wanted, (start, memory), found)
        for begin, end in runs_of(wanted):
            low, high = span_of(begin, part.size_bytes)[0], span_of(end - 1, part.size_bytes)[1]
            found.missing.append((max(low, start), min(high, stop)))
        return found

    def _from(
        self,
        source: CopySource,
        rank: int,
        part: RankBytes,
        wanted: Sequence[int],
        place: tuple[int, Bytes],
        found: Fetched,
    ) -> list[int]:
        """Read the pieces `wanted` from one source; return those that are still wanted."""
        start, memory = place
        bad: list[int] = []
        done = 0
        name = f"node {source.node}"
        try:
            for begin, end in runs_of(wanted):
                with self._reader(source, rank, part, begin, end) as read:
                    for number in range(begin, end):
                        low, high = span_of(number, part.size_bytes)
                        inside = start <= low and high <= start + len(memory)
                        piece = (
                            memory[low - start : high - start]
                            if inside
                            else np.empty(high - low, np.uint8)
                        )
                        read(number, piece)
                        if digest_of(piece) != digest_at(part.digests, number):
                            bad.append(number)
                        elif not inside:
                            _cut(piece, low, memory, start)
                        done = number + 1
                        count = found.read_bytes.get(source.kind, 0)
                        found.read_bytes[source.kind] = count + high - low
        except ReplicaError as error:
            self._forget(source)
            left = [number for number in wanted if number >= done]
            found.notes.append(f"rank {rank}, {len(left)} pieces from {name}: {error}")
            return bad + left
        if bad:
            found.notes.append(
                f"rank {rank}, {len(bad)} pieces from {name}: the bytes differ from their checksum"
            )
        return bad

    def _reader(
        self, source: CopySource, rank: int, part: RankBytes, begin: int, end: int
    ) -> OwnRun | PeerRun:
        named = described(rank, self._plan.version)
        low, high = span_of(begin, part.size_bytes)[0], span_of(end - 1, part.size_bytes)[1]
        endpoint = self.endpoint(source.node)
        if source.kind == "peer":
            return PeerRun(endpoint, named, low, high)
        if rank not in self._files:
            _, self._files[rank] = endpoint.ask_fd("open", **named)
        return OwnRun(self._files[rank])

    def endpoint(self, node: int | None) -> Endpoint:
        """Return the connection to the agent of `node`. Raises ReplicaError."""
        if node not in self._endpoints:
            if node == self._node:
                self._endpoints[node] = self._local()
            else:
                if node is None or node not in self._addresses:
                    raise ReplicaError(f"node {node} has no agent")
                self._endpoints[node] = self._remote(self._addresses[node])
        return self._endpoints[node]

    def _forget(self, source: CopySource) -> None:
        """Close a connection that is in an unknown state."""
        if (endpoint := self._endpoints.pop(source.node, None)) is not None:
            endpoint.close()

    def close(self) -> None:
        """Close all connections."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        for fd in self._files.values():
            os.close(fd)
        self._endpoints, self._files = {}, {}


class OwnRun:
    """Pieces from the memory of this node's agent, by its open file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> Callable[[int, Bytes], None]:
        return self._read

    def __exit__(self, *_: object) -> None:
        pass

    def _read(self, number: int, piece: Bytes) -> None:
        view, offset = memoryview(piece.data), span_of(number, 1 << 62)[0]
        while len(view):
            count = os.preadv(self._fd, [view], offset)
            if not count:
                raise ReplicaError("the segment is shorter than its header says")
            view, offset = view[count:], offset + count


class PeerRun:
    """Consecutive pieces from the agent of another node, in one answer."""

    def __init__(self, endpoint: Endpoint, named: Message, low: int, high: int) -> None:
        self._endpoint, self._request = endpoint, named
        self._low, self._high = low, high

    def __enter__(self) -> Callable[[int, Bytes], None]:
        wire = self._endpoint.wire
        wire.send({"op": "get", "start": self._low, "stop": self._high, **self._request})
        _, length = wire.header()
        if length != self._high - self._low:
            raise ReplicaError(f"{wire.other} sends {length} bytes, not {self._high - self._low}")
        return self._read

    def __exit__(self, *_: object) -> None:
        pass

    def _read(self, _: int, piece: Bytes) -> None:
        self._endpoint.wire.take_into(piece)


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of each run of consecutive `numbers`, in ascending order."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def _cut(piece: Bytes, low: int, memory: Bytes, start: int) -> None:
    """Copy what `piece`, which begins at `low`, has of `memory`, which begins at `start`."""
    begin, end = max(low, start), min(low + len(piece), start + len(memory))
    memory[begin - start : end - start] = piece[begin - low : end - low]
