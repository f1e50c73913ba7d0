"""Transport: connections between the ranks of a job, over which bytes of files travel.

    transport = Transport(control)
    wire = transport.outgoing(3)
    wire.send(SentPiece(0), *image.views(0, 4 << 20))

Own sockets on the interface that the control plane uses: neither the trainer's process groups nor a
pickle. Each connection proves with a random token of the job that both ends belong to it.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from functools import partial
from typing import Self

from iobench.errors import RankError
from iobench.ranks.control import Control
from iobench.ranks.listener import Listener
from iobench.ranks.wire import Hello, Message, Welcome, Wire, introduce

__all__ = ["STALLED_S", "SentPiece", "Transport"]

STALLED_S = 300.0
"""How long a connection may move no byte: a rank may read from slow storage meanwhile."""

_GREETING_S = 20.0
_CONNECT_S = 60.0
_LOOK_S = 0.5
_ROOM = 1024
_STRANGERS = 64  # connections of others than ranks
_PURPOSE = "pieces of rank {}"


class SentPiece(Message):
    """The bytes of a numbered piece follow."""

    number: int


class Transport:
    """The connections of this rank to others. All ranks make, reset and close it together.

    A connection has one direction, and lives until `reset` or `close`. It is made when it is first
    used: by `outgoing` in the sender and `incoming` in the receiver, which each wait for the other.
    Its errors are RankErrors that name the other rank; also when the job is broken, and when no
    byte moves for `stalled_s`.
    """

    def __init__(self, control: Control, *, stalled_s: float = STALLED_S) -> None:
        """Listen, and exchange the addresses. Raises RankError."""
        self._control, self._world = control.sub("transport"), control.world
        self._stalled_s = stalled_s
        self._outgoing: dict[int, Wire] = {}
        self._incoming: dict[tuple[int, int], Wire] = {}
        self._epoch = 0
        self._changed = threading.Condition()
        self._closed = self._cut = False
        self.nodes: list[int] = [self._world.node]
        """The node of each rank."""
        self._listener: Listener | None = None
        if self._world.size > 1:
            self._listen()

    def _listen(self) -> None:
        interface = self._control.interface
        assert interface is not None  # a job of several ranks has one
        server = socket.create_server((interface.address, 0), backlog=_ROOM)
        port = server.getsockname()[1]
        own = [interface.address, port, self._world.host, self._world.node]
        deadline_s = _CONNECT_S
        token = secrets.token_hex(16) if self._world.rank == 0 else None
        self._token = self._control.broadcast("token", token, deadline_s=deadline_s).encode()
        found = self._control.all_gather("addresses", own, deadline_s=deadline_s)
        self._addresses: list[tuple[str, int, str]] = [
            (at, port, name) for at, port, name, _ in found
        ]
        self.nodes = [node for *_, node in found]
        self._listener = Listener(
            [server],
            token=self._token,
            purpose=_PURPOSE.format(self._world.rank),
            admit=self._admit,
            most=self._world.size + _STRANGERS,
            greeting_s=_GREETING_S,
        )

    @property
    def control(self) -> Control:
        """The control plane of this transport's users: all ranks make the same calls."""
        return self._control

    def outgoing(self, rank: int) -> Wire:
        """Return the connection on which this rank sends to `rank`. Raises RankError."""
        if rank not in self._outgoing:
            host, port, name = self._addresses[rank]
            try:
                connection = socket.create_connection((host, port), timeout=_GREETING_S)
            except OSError as error:
                self._control.check()
                raise RankError(
                    f"rank {rank} (host {name}) cannot be reached at {host}:{port}: {error}",
                    ranks=[rank],
                ) from error
            wire = Wire(connection, "", _GREETING_S)
            try:
                # A stopped process accepts connections, and says nothing.
                self._name(wire, rank, _GREETING_S)
                purpose, own = _PURPOSE.format(rank), self._world.rank
                introduce(wire, self._token, purpose, rank=own, epoch=self._epoch)
                self._name(wire, rank, self._stalled_s)
            except BaseException:
                wire.close()
                raise
            self._outgoing[rank] = wire
        if self._cut:
            self._outgoing[rank].end()
        return self._outgoing[rank]

    def incoming(self, rank: int) -> Wire:
        """Return the connection on which `rank` sends to this rank; wait until it has connected."""
        key, until_s = (self._epoch, rank), time.monotonic() + _CONNECT_S
        with self._changed:
            while key not in self._incoming:
                self._control.check()
                if self._cut:
                    raise RankError(f"rank {rank}: all connections were cut", ranks=[rank])
                if time.monotonic() > until_s:
                    raise RankError(
                        f"rank {rank} (host {self._addresses[rank][2]}) did not connect within "
                        f"{_CONNECT_S:g} s",
                        ranks=[rank],
                    )
                self._changed.wait(_LOOK_S)
            return self._incoming[key]

    def cut(self) -> None:
        """End all connections: no thread and no other rank waits on them then. `reset` follows."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()
        for wire in self._wires():
            wire.end()

    def reset(self) -> None:
        """Make new connections when they are used next. All ranks do this after a failure."""
        self.cut()
        with self._changed:
            old = self._wires()
            self._outgoing.clear()
            self._epoch += 1
            self._cut = False
            self._incoming = {key: one for key, one in self._incoming.items() if one not in old}
        for wire in old:
            wire.close()

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        with self._changed:
            self._closed = True
            wires = [*self._outgoing.values(), *self._incoming.values()]
            self._outgoing.clear()
            self._incoming.clear()
        for wire in wires:
            wire.close()
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wires(self) -> list[Wire]:
        with self._changed:
            incoming = [wire for (epoch, _), wire in self._incoming.items() if epoch <= self._epoch]
            return [*self._outgoing.values(), *incoming]

    def _name(self, wire: Wire, rank: int, limit_s: float) -> None:
        """Let the errors of `wire` name the rank at its other end."""
        wire.other = f"rank {rank} (host {self._addresses[rank][2]})"
        wire.failure = partial(RankError, ranks=[rank])
        wire.limit(limit_s, self._control.check)

    def _admit(self, wire: Wire, hello: Hello, welcome: Welcome) -> None:
        """Take the connection of a rank that has proven itself; the listener's thread calls it."""
        if not 0 <= hello.rank < self._world.size:
            raise wire.failed("is not a rank of this job")
        self._name(wire, hello.rank, self._stalled_s)
        with self._changed:
            key = hello.epoch, hello.rank
            if self._closed or key in self._incoming or hello.epoch < self._epoch:
                raise wire.failed("came too late, or a second time")
            wire.send(welcome)
            self._incoming[key] = wire
            self._changed.notify_all()
