"""NodeAgents: the agents of a job's nodes, as one rank uses them."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from typing import Any

import numpy as np

from iobench.errors import IobenchError, ReplicaError
from iobench.ranks.control import Control
from iobench.ranks.wire import Wire
from iobench.replicas import protocol
from iobench.replicas.fetch import Fetcher
from iobench.replicas.partner import Partner
from iobench.replicas.protocol import Address, AgentDone, MemoryCopy, RecoveryPlan, Version, connect
from iobench.replicas.runtime import (
    AgentDirectory,
    AgentRecord,
    job_of,
    start_agent,
    stop_earlier_agents,
)
from iobench.replicas.segment import PIECE, digest_of
from iobench.writers.image import Bytes, FileImage

__all__ = ["NodeAgents"]

_START_S = 120.0
_TIMEOUT_S = 60.0


class NodeAgents:
    """Starts the agent of this node (in local rank 0) and connects to it.

    `join` is a call of all ranks. `addresses` has the agents of all nodes; `nodes` the node of each
    rank.
    """

    def __init__(self, partner: Partner, control: Control, location: str) -> None:
        self._partner, self._control, self._location = partner, control, location
        self._world = control.world
        self._job = job_of(location)
        self._directory = AgentDirectory.of(self._job)
        self._token = b""
        self._present: Wire | None = None
        self.nodes: list[int] = []
        self.addresses: dict[int, Address] = {}
        self.targets: list[int] = []
        """The node that keeps the copy of each rank; empty with one node."""
        self.stopped: list[AgentRecord] = []
        """Agents of earlier jobs at the same location, which were stopped."""

    @property
    def first(self) -> bool:
        """Whether this rank starts the agent of its node."""
        return self._world.local_rank == 0

    def join(self) -> None:
        """Start or find the agents of all nodes. Raises RankError in all ranks if one fails."""
        world, control = self._world, self._control
        known = error = None
        if self.first:
            try:
                self.stopped = stop_earlier_agents(self._job, self._location)
                token = self._directory.token() if self._directory.record() else None
                known = token.hex() if token else None
            except (IobenchError, OSError) as failure:
                error = failure
        fresh = secrets.token_hex(32) if world.rank == 0 else None
        facts = control.all_gather(
            "find memory agents", [world.node, known, fresh], deadline_s=_START_S, error=error
        )
        self.nodes = [node for node, _, _ in facts]
        # A node that came back has no token; one of an earlier job of this name has another one.
        votes = Counter(known for _, known, _ in facts if known)
        chosen = votes.most_common(1)[0][0] if votes else facts[0][2]
        self._token = bytes.fromhex(chosen)
        if len(set(self.nodes)) > 1:
            self.targets = self._partner.targets(self.nodes)
        self._connect()

    def _connect(self) -> None:
        address = error = None
        if self.first:
            try:
                address = self.start()
            except (IobenchError, OSError) as failure:
                error = failure
        found = self._control.all_gather(
            "start memory agents", address, deadline_s=_START_S, error=error
        )
        self.learn(found)
        self._stay()

    def _stay(self) -> None:
        """Hold a connection without requests: an agent without any ends after a while."""
        self.close()
        self._present = self.local()

    def start(self) -> Address:
        """Start the agent of this node unless it runs; return its address."""
        interface = self._control.interface
        assert interface is not None  # a job of several ranks has one
        record = start_agent(
            self._directory,
            self._token,
            host=interface.address,
            job=self._job,
            location=self._location,
            keep_s=self._partner.keep_s,
        )
        with self.local() as agent:
            agent.ask(
                AgentDone,
                protocol.Start(
                    self._expected(), self._world.local_size, self._partner.budget_bytes
                ),
            )
        return record.address

    def running(self, *, doubtful: bool) -> Address:
        """Return the address of this node's agent; start it anew when it has ended.

        With `doubtful` it is also looked at whether it answers.
        """
        record = self._directory.record()
        if record is not None and not doubtful:
            return record.address
        address = self.start()
        if record is None or record.address != address:
            self._stay()
            self.set_pace()
        return address

    def learn(self, addresses: list[Any]) -> None:
        """Note the addresses that the first rank of each node has told, in rank order."""
        for node, address in zip(self.nodes, addresses, strict=True):
            if address is not None:
                self.addresses[node] = (str(address[0]), int(address[1]))

    def set_pace(self) -> float | None:
        """Set the rate of this node's agent; return it in bytes per second. None: no other node."""
        if not self.targets:
            return None
        with self.local() as agent:
            address = self.addresses[self.targets[self._world.rank]]
            request = protocol.MeasureRate(
                address, self._partner.share, self._partner.rate_bytes_per_s
            )
            return agent.ask(protocol.Rate, request).rate_bytes_per_s

    def _expected(self) -> list[int]:
        """Return the ranks whose bytes this node keeps: its own, and those of its partner."""
        here = self._world.node
        return [rank for nodes in (self.nodes, self.targets) for rank in _ranks_at(here, nodes)]

    def local(self) -> Wire:
        """Open a connection to this node's agent. Raises ReplicaError."""
        return connect(self._directory.socket, self._token, timeout_s=_TIMEOUT_S)

    def copy(self, version: Version, image: FileImage, header: bytes) -> None:
        """Copy the bytes of this rank into the agent of its node. Raises ReplicaError."""
        named = version, self._world.rank, self._world.size, image.size_bytes
        digests = []
        with self.local() as agent:
            agent.ask(AgentDone, protocol.Begin(*named))
            fd = agent.receive_fd()
            try:
                for start in range(0, image.size_bytes, PIECE):
                    views = image.views(start, min(start + PIECE, image.size_bytes))
                    piece = views[0] if len(views) == 1 else np.concatenate(views)
                    digests.append(digest_of(piece))
                    # Not through a mapping: mmap makes pages under Python's lock.
                    _write(fd, piece, start)
            finally:
                os.close(fd)
            listed = b"".join(digests)
            agent.ask(AgentDone, protocol.Filled(*named, len(listed)), listed, header)

    def push(self, version: Version) -> int:
        """Let the agent send this rank's bytes to its partner; return the damaged pieces.

        On return they are complete there. Raises ReplicaError.
        """
        if not self.targets:
            return 0
        rank = self._world.rank
        address = self.addresses[self.targets[rank]]
        # A connection of its own without a time limit: at a low pace, minutes are in order.
        with connect(self._directory.socket, self._token, timeout_s=None) as agent:
            return agent.ask(protocol.Pushed, protocol.Push(version, rank, address)).damaged

    def held(self) -> list[MemoryCopy]:
        """Return what all agents hold. A call of all ranks."""
        segments: list[Any] = []
        if self.first:
            try:
                with self.local() as agent:
                    segments = agent.ask(protocol.Segments, protocol.Inventory()).segments
            except ReplicaError:  # it has ended: it holds nothing
                segments = []
        listed = self._control.all_gather("list replicas", segments, deadline_s=_START_S)
        return [
            MemoryCopy(Version(*one["version"]), one["rank"], one["ranks"], node)
            for node, own in zip(self.nodes, listed, strict=True)
            for one in own
        ]

    def fetcher(self, plan: RecoveryPlan) -> Fetcher:
        """Return a reader of the bytes of `plan`."""
        return Fetcher(
            plan,
            node=self._world.node,
            local=self.local,
            remote=lambda address: connect(address, self._token, timeout_s=_TIMEOUT_S),
            addresses=self.addresses,
        )

    def resume(self, version: Version | None) -> Address:
        """Let this node's agent drop what is newer than `version`; return its address."""
        address = self.running(doubtful=False)
        with self.local() as agent:
            agent.ask(AgentDone, protocol.Resume(version))
        return address

    def settle(self, version: Version, *, kept: bool) -> None:
        """Tell this node's agent whether all ranks have `version`."""
        with self.local() as agent:
            agent.ask(AgentDone, protocol.Settle(version, kept))

    def forget(self, step: int) -> None:
        """Let this node's agent drop all versions of `step`."""
        with self.local() as agent:
            agent.ask(AgentDone, protocol.Forget(step))

    def finish(self) -> None:
        """Say that this rank has ended well. With the last one of the node the agent ends."""
        with self.local() as agent:
            agent.ask(AgentDone, protocol.Finish(self._world.rank))

    def close(self) -> None:
        """Close the connection. The agent and its memory stay."""
        if self._present is not None:
            self._present.close()
            self._present = None


def _ranks_at(node: int, nodes: list[int]) -> list[int]:
    return [rank for rank, other in enumerate(nodes) if other == node]


def _write(fd: int, piece: Bytes, offset: int) -> None:
    view = memoryview(np.ascontiguousarray(piece).data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
