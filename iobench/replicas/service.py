"""Service: what an agent does for one connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from iobench.errors import ReplicaError
from iobench.ranks.messages import Message
from iobench.replicas.endpoint import rank_of, version_of
from iobench.replicas.frames import Wire
from iobench.replicas.pieces import PIECE, count_of
from iobench.replicas.push import measure, push
from iobench.replicas.recovery import Version
from iobench.replicas.segment import MemorySegment, RankBytes
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
        self._agent, self._wire = agent, wire
        common: dict[str, Callable[[Message, int], None]] = {
            "describe": self._describe,
            "get": self._get,
            "put": self._put,
            "probe": self._probe,
            "inventory": self._inventory,
        }
        own: dict[str, Callable[[Message, int], None]] = {
            "start": self._start,
            "begin": self._begin,
            "fill": self._fill,
            "push": self._push,
            "measure": self._measure,
            "settle": self._settle,
            "resume": self._resume,
            "forget": self._forget,
            "open": self._open,
            "finish": self._finish,
            "stop": self._stop,
            "status": self._status,
        }
        self._handlers = common | (own if local else {})

    def run(self) -> None:
        """Answer requests until the other end closes the connection. Raises ReplicaError."""
        while (found := self._wire.receive()) is not None:
            message, length = found
            handler = self._handlers.get(str(message.get("op")))
            if handler is None:
                self._wire.send({"error": f"no such request: {message.get('op')!r:.40}"})
                return
            handler(message, length)

    def _refused(self, error: ReplicaError) -> None:
        self._wire.send({"error": str(error)})

    def _answer(self, **fields: Any) -> None:
        self._wire.send({"ok": True, **fields})

    def _start(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._agent.holdings.expect([int(rank) for rank in message["keeps"]])
        self._agent.ranks = int(message["ranks"])
        self._agent.finished.clear()
        budget = message["budget_bytes"]
        self._agent.holdings.memory.budget_bytes = None if budget is None else int(budget)
        self._answer()

    def _begin(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        rank, version = rank_of(message), version_of(message)
        try:
            segment = self._segment(rank, version, int(message["ranks"]))
            self._with_room(rank, lambda: segment.reserve(version, int(message["size"])))
        except ReplicaError as error:
            self._refused(error)
            return
        self._answer()
        self._wire.send_fd(segment.fd)

    def _segment(self, rank: int, version: Version, ranks: int) -> MemorySegment:
        return self._agent.holdings.begin(rank, version, ranks)

    def _with_room(self, rank: int, take: Callable[[], None]) -> None:
        """Call `take`, which takes memory; again without segments of an earlier placement."""
        try:
            take()
        except ReplicaError:
            if not self._agent.holdings.make_room(rank):
                raise
            take()

    def _fill(self, message: Message, length: int) -> None:
        part = self._described_part(message, length)
        version = version_of(message)
        try:
            segment = self._segment(rank_of(message), version, int(message["ranks"]))
            segment.fill(version, part)
        except ReplicaError as error:
            self._refused(error)
            return
        self._answer()

    def _described_part(self, message: Message, length: int) -> RankBytes:
        """Receive digests and header of a rank's bytes."""
        payload = self._wire.take(length, _LONGEST)
        cut = int(message["digests"])
        return RankBytes(int(message["size"]), payload[:cut], payload[cut:])

    def _push(self, message: Message, length: int) -> None:
        """Send a complete segment of a rank of this node to another agent; answer when it is there.

        The connection of the trainer may end meanwhile: the transfer is finished.
        """
        self._wire.take(length, 0)
        rank, version = rank_of(message), version_of(message)
        try:
            segment = self._agent.holdings.find(rank, version)
            sent = push(segment, version, tuple(message["address"]), self._agent)
        except ReplicaError as error:
            self._refused(error)
            return
        self._answer(sent_bytes=sent.sent_bytes, damaged=sent.damaged)

    def _measure(self, message: Message, length: int) -> None:
        """Measure the rate to another agent and set the pace, a share of it."""
        self._wire.take(length, 0)
        try:
            rate = message["rate_bytes_per_s"]
            if rate is None:
                rate = float(message["share"]) * measure(tuple(message["address"]), self._agent)
        except ReplicaError as error:
            self._refused(error)
            return
        self._agent.bucket.rate_bytes_per_s = rate
        self._answer(rate_bytes_per_s=rate)

    def _probe(self, _: Message, length: int) -> None:
        memory = np.empty(PIECE, np.uint8)
        while length:
            count = min(length, PIECE)
            self._wire.take_into(memory[:count])
            length -= count
        self._answer()

    def _put(self, message: Message, length: int) -> None:
        """Receive the pieces of one rank, until the sender says that it has sent all."""
        part = self._described_part(message, length)
        rank, version = rank_of(message), version_of(message)
        try:
            segment = self._segment(rank, version, int(message["ranks"]))
            if not segment.complete:
                self._with_room(rank, lambda: segment.declare(version, part))
            missing = segment.missing(version)
        except ReplicaError as error:
            self._refused(error)
            return
        self._answer(missing=_ranges(missing))
        memory = np.empty(PIECE, np.uint8)
        while (found := self._wire.receive()) is not None:  # at its end: it stays incomplete
            message, length = found
            try:
                if "piece" in message:
                    number = self._piece(message, length, part, memory)
                    segment.add(version, number, memory[:length])
                    continue
                self._wire.take(length, 0)
                missing = segment.missing(version)
            except ReplicaError as error:
                self._refused(error)
                raise
            self._answer(missing=_ranges(missing))
            if not missing:
                return

    def _piece(self, message: Message, length: int, part: RankBytes, memory: Bytes) -> int:
        """Receive a piece into `memory`; return its number."""
        number = int(message["piece"])
        if length > PIECE or number not in range(count_of(part.size_bytes)):
            raise ReplicaError(f"piece {number} of {length} bytes has no position here")
        self._wire.take_into(memory[:length])
        return number

    def _describe(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        try:
            segment = self._agent.holdings.find(rank_of(message), version_of(message))
            part = segment.part
            if part is None:
                raise ReplicaError(f"rank {segment.rank} was replaced by another save")
        except ReplicaError as error:
            self._refused(error)
            return
        fields = {"ok": True, "size": part.size_bytes, "digests": len(part.digests)}
        self._wire.send(fields, part.digests + part.header)

    def _get(self, message: Message, length: int) -> None:
        """Send bytes of a complete segment. The receiver compares the digests."""
        self._wire.take(length, 0)
        start, stop = int(message["start"]), int(message["stop"])
        try:
            segment = self._agent.holdings.find(rank_of(message), version_of(message))
            if not 0 <= start <= stop <= segment.size_bytes:
                raise ReplicaError(f"[{start}, {stop}) of {segment.size_bytes} bytes")
        except ReplicaError as error:
            self._refused(error)
            return
        fd = os.dup(segment.fd)  # a save may replace the segment: then the digests differ
        try:
            self._wire.announce({"ok": True}, stop - start)
            self._wire.send_file(fd, start, stop, lambda _: None, None)
        finally:
            os.close(fd)

    def _open(self, message: Message, length: int) -> None:
        """Pass the memory of a complete segment, readable only."""
        self._wire.take(length, 0)
        try:
            segment = self._agent.holdings.find(rank_of(message), version_of(message))
            fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except ReplicaError as error:
            self._refused(error)
            return
        try:
            self._answer()
            self._wire.send_fd(fd)
        finally:
            os.close(fd)

    def _inventory(self, _: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._answer(segments=self._agent.holdings.inventory())

    def _settle(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._agent.holdings.settle(version_of(message), kept=message.get("kept") is True)
        self._answer()

    def _resume(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        version = None if message.get("version") is None else version_of(message)
        self._agent.holdings.resume(version)
        self._answer()

    def _forget(self, message: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._agent.holdings.forget(int(message["step"]))
        self._answer()

    def _finish(self, message: Message, length: int) -> None:
        """A rank of this node has ended well. After the last one the agent ends too."""
        self._wire.take(length, 0)
        self._agent.finished.add(int(message["rank"]))
        self._answer()
        if len(self._agent.finished) >= self._agent.ranks:
            self._agent.stop()

    def _stop(self, _: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._answer()
        self._agent.stop()

    def _status(self, _: Message, length: int) -> None:
        self._wire.take(length, 0)
        self._answer(**self._agent.status())


def _ranges(numbers: list[int]) -> list[list[int]]:
    """Return [begin, end] of each run of `numbers`, which are in order: short messages."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs
