"""Service: what an agent does for one connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from iobench.errors import ReplicaError
from iobench.ranks.wire import Message, Refusal, Wire, sendable
from iobench.replicas import protocol
from iobench.replicas.push import measure, push
from iobench.replicas.segment import PIECE, MemorySegment, RankBytes, count_of, runs_of
from iobench.units import GIB
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    from iobench.replicas.agent import Agent

__all__ = ["Service"]

_LONGEST = GIB  # of digests and headers


class Service:
    """Answers the requests of one connection until it ends.

    Requests that change the state of the node's own ranks come only through the unix socket.
    """

    def __init__(self, agent: Agent, wire: Wire, *, local: bool) -> None:
        self._agent, self._wire, self._local = agent, wire, local
        self._holdings = agent.holdings

    def run(self) -> None:
        """Answer requests until the other end closes the connection. Raises ReplicaError."""
        while (found := self._wire.receive_next(protocol.Request)) is not None:
            request, length = found
            if not (self._local or isinstance(request, protocol.FOR_ALL)):
                name = type(request).__name__.lower()
                self._wire.send(Refusal(f"{name!r} is for ranks of this node only"))
                return
            try:
                answer = self._answer(request, length)
            except ReplicaError as error:
                answer = Refusal(sendable(str(error)))
            if answer is not None:
                self._wire.send(answer)

    def _answer(self, request: protocol.Request, length: int) -> Message | None:
        """Carry out a request. Return the answer; None if it was sent."""
        if isinstance(request, protocol.ProbeRate):
            return self._probe(length)
        payload = bytes(self._wire.take(length, _LONGEST))
        match request:
            case protocol.Start():
                return self._start(request)
            case protocol.Begin():
                self._begin(request)
                return None
            case protocol.Filled():
                segment = self._segment(request)
                segment.fill(request.version, _part(request, payload))
            case protocol.PutSegment():
                self._put(request, _part(request, payload))
                return None
            case protocol.Push():
                # The connection of the trainer may end meanwhile: the transfer is finished.
                return push(
                    self._holdings.find(request.rank, request.version),
                    request,
                    self._agent.token,
                    self._agent.bucket,
                )
            case protocol.MeasureRate():
                return self._measure(request)
            case protocol.Describe():
                self._describe(request)
                return None
            case protocol.Get():
                self._get(request)
                return None
            case protocol.Open():
                self._open(request)
                return None
            case protocol.Inventory():
                return protocol.Segments(self._holdings.inventory())
            case protocol.Settle():
                self._holdings.settle(request.version, kept=request.kept)
            case protocol.Resume():
                self._holdings.resume(request.version)
            case protocol.Forget():
                self._holdings.forget(request.step)
            case protocol.AgentStatus():
                return self._agent.status()
            case protocol.Finish() | protocol.Stop():
                self._end(request)
                return None
        return protocol.AgentDone()

    def _start(self, request: protocol.Start) -> Message:
        self._holdings.expect(request.keeps)
        self._agent.ranks = request.ranks
        self._agent.finished.clear()
        self._holdings.memory.budget_bytes = request.budget_bytes
        return protocol.AgentDone()

    def _begin(self, request: protocol.Begin) -> None:
        segment = self._segment(request)
        self._with_room(request.rank, lambda: segment.reserve(request.version, request.size_bytes))
        self._wire.send(protocol.AgentDone())
        self._wire.send_fd(segment.fd)

    def _segment(
        self, request: protocol.Begin | protocol.Filled | protocol.PutSegment
    ) -> MemorySegment:
        return self._holdings.begin(request.rank, request.version, request.ranks)

    def _with_room(self, rank: int, take: Callable[[], None]) -> None:
        """Call `take`, which takes memory; again without segments of an earlier placement."""
        try:
            take()
        except ReplicaError:
            if not self._holdings.make_room(rank):
                raise
            take()

    def _measure(self, request: protocol.MeasureRate) -> Message:
        """Measure the rate to another agent and set the pace, a share of it."""
        rate = request.rate_bytes_per_s
        if rate is None:
            rate = request.share * measure(request.address, self._agent.token)
        self._agent.bucket.rate_bytes_per_s = rate
        return protocol.Rate(rate)

    def _probe(self, length: int) -> Message:
        memory = np.empty(PIECE, np.uint8)
        while length:
            count = min(length, PIECE)
            self._wire.take_into(memory[:count])
            length -= count
        return protocol.AgentDone()

    def _put(self, request: protocol.PutSegment, part: RankBytes) -> None:
        """Receive the pieces of one rank, until the sender says that it has sent all."""
        rank, version = request.rank, request.version
        segment = self._segment(request)
        if not segment.complete:
            self._with_room(rank, lambda: segment.declare(version, part))
        missing = protocol.MissingPieces(runs_of(segment.missing(version)))
        self._wire.send(missing)
        memory = np.empty(PIECE, np.uint8)
        # At the end of the connection it stays incomplete.
        while (found := self._wire.receive_next(protocol.PutPart)) is not None:
            message, length = found
            if isinstance(message, protocol.PutPiece):
                self._piece(message.number, length, part, memory)
                segment.add(version, message.number, memory[:length])
                continue
            missing = protocol.MissingPieces(runs_of(segment.missing(version)))
            self._wire.send(missing)
            if not missing.pieces:
                return

    def _piece(self, number: int, length: int, part: RankBytes, memory: Bytes) -> None:
        if length > PIECE or number not in range(count_of(part.size_bytes)):
            raise ReplicaError(f"piece {number} of {length} bytes has no position here")
        self._wire.take_into(memory[:length])

    def _describe(self, request: protocol.Describe) -> None:
        segment = self._holdings.find(request.rank, request.version)
        part = segment.part
        if part is None:
            raise ReplicaError(f"rank {segment.rank} was replaced by another save")
        answer = protocol.Described(part.size_bytes, len(part.digests))
        self._wire.send(answer, part.digests, part.header)

    def _get(self, request: protocol.Get) -> None:
        """Send bytes of a complete segment. The receiver compares the digests."""
        start, stop = request.start, request.stop
        segment = self._holdings.find(request.rank, request.version)
        if not start <= stop <= segment.size_bytes:
            raise ReplicaError(f"[{start}, {stop}) of {segment.size_bytes} bytes")
        fd = os.dup(segment.fd)  # a save may replace the segment: then the digests differ
        try:
            self._wire.send_file(protocol.AgentDone(), fd, start, stop)
        finally:
            os.close(fd)

    def _open(self, request: protocol.Open) -> None:
        """Pass the memory of a complete segment, readable only."""
        segment = self._holdings.find(request.rank, request.version)
        fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._wire.send(protocol.AgentDone())
            self._wire.send_fd(fd)
        finally:
            os.close(fd)

    def _end(self, request: protocol.Finish | protocol.Stop) -> None:
        """End the agent, or count a rank that has ended well: after the last one it ends too."""
        self._wire.send(protocol.AgentDone())
        if isinstance(request, protocol.Finish):
            self._agent.finished.add(request.rank)
        if isinstance(request, protocol.Stop) or len(self._agent.finished) >= self._agent.ranks:
            self._agent.stop()


def _part(request: protocol.Filled | protocol.PutSegment, payload: bytes) -> RankBytes:
    cut = request.digests
    return RankBytes(request.size_bytes, payload[:cut], payload[cut:])
