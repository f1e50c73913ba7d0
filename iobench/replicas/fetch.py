"""Fetcher: reads a rank's bytes from the agents' memory and compares every piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from iobench.errors import ReplicaError
from iobench.ranks.wire import Wire
from iobench.replicas.protocol import (
    Address,
    AgentDone,
    CopySource,
    Describe,
    Described,
    Get,
    Open,
    RecoveryPlan,
)
from iobench.replicas.segment import (
    RankBytes,
    digest_at,
    digest_of,
    pieces_of,
    runs_of,
    span_of,
)
from iobench.units import GIB
from iobench.writers.image import Bytes

__all__ = ["Fetched", "Fetcher"]

_LONGEST = GIB  # of digests and headers


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
        local: Callable[[], Wire],
        remote: Callable[[Address], Wire],
        addresses: Mapping[int, Address],
    ) -> None:
        self._plan, self._node = plan, node
        self._local, self._remote, self._addresses = local, remote, addresses
        self._agents: dict[int | None, Wire] = {}
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
        agent = self.agent(source.node)
        agent.send(Describe(self._plan.version, rank))
        answer, length = agent.receive(Described)
        described, cut = bytes(agent.take(length, _LONGEST)), answer.digests
        part = RankBytes(answer.size_bytes, described[:cut], described[cut:])
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
        version = self._plan.version
        low, high = span_of(begin, part.size_bytes)[0], span_of(end - 1, part.size_bytes)[1]
        agent = self.agent(source.node)
        if source.kind == "peer":
            return PeerRun(agent, Get(version, rank, low, high))
        if rank not in self._files:
            agent.ask(AgentDone, Open(version, rank))
            self._files[rank] = agent.receive_fd()
        return OwnRun(self._files[rank])

    def agent(self, node: int | None) -> Wire:
        """Return the connection to the agent of `node`. Raises ReplicaError."""
        if node not in self._agents:
            if node == self._node:
                self._agents[node] = self._local()
            else:
                if node is None or node not in self._addresses:
                    raise ReplicaError(f"node {node} has no agent")
                self._agents[node] = self._remote(self._addresses[node])
        return self._agents[node]

    def _forget(self, source: CopySource) -> None:
        """Close a connection that is in an unknown state."""
        if (agent := self._agents.pop(source.node, None)) is not None:
            agent.close()

    def close(self) -> None:
        """Close all connections."""
        for agent in self._agents.values():
            agent.close()
        for fd in self._files.values():
            os.close(fd)
        self._agents, self._files = {}, {}


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

    def __init__(self, wire: Wire, request: Get) -> None:
        self._wire, self._request = wire, request

    def __enter__(self) -> Callable[[int, Bytes], None]:
        wire, wanted = self._wire, self._request.stop - self._request.start
        wire.send(self._request)
        _, length = wire.receive(AgentDone)
        if length != wanted:
            raise wire.failed(f"sends {length} bytes, not {wanted}")
        return self._read

    def __exit__(self, *_: object) -> None:
        pass

    def _read(self, _: int, piece: Bytes) -> None:
        self._wire.take_into(piece)


def _cut(piece: Bytes, low: int, memory: Bytes, start: int) -> None:
    """Copy what `piece`, which begins at `low`, has of `memory`, which begins at `start`."""
    begin, end = max(low, start), min(low + len(piece), start + len(memory))
    memory[begin - start : end - start] = piece[begin - low : end - low]
