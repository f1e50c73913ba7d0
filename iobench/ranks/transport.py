"""Transport: connections between the ranks of a job, over which bytes of files travel.

    transport = Transport(control)
    link = transport.outgoing(3)
    link.send(0, image.views(0, 4 << 20))

Own sockets on the interface that the control plane uses: neither the trainer's process groups nor a
pickle. Each connection proves with a random token of the job that both ends belong to it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from iobench.errors import RankError
from iobench.ranks.control import Control
from iobench.ranks.link import Link, exactly
from iobench.ranks.messages import PREFIX, Message, length_of, pack, proof, unpack
from iobench.ranks.newcomers import Newcomers

__all__ = ["STALLED_S", "Transport"]

STALLED_S = 300.0
"""How long a connection may move no byte: a rank may read from slow storage meanwhile."""

_GREETING_S = 20.0
_CONNECT_S = 60.0
_LOOK_S = 0.5
_ROOM = 1024
_STRANGERS = 64  # connections of others than ranks


class Transport:
    """The links of this rank. All ranks make, reset and close it together.

    A link has one direction, and lives until `reset` or `close`. It is made when it is first used:
    by `outgoing` in the sender and `incoming` in the receiver, which each wait for the other.
    """

    def __init__(self, control: Control, *, stalled_s: float = STALLED_S) -> None:
        """Listen, and exchange the addresses. Raises RankError."""
        self._control, self._world = control.sub("transport"), control.world
        self._stalled_s = stalled_s
        self._outgoing: dict[int, Link] = {}
        self._incoming: dict[tuple[int, int], Link] = {}
        self._epoch = 0
        self._changed = threading.Condition()
        self._closed = self._cut = False
        self._newcomers = Newcomers(self._world.size + _STRANGERS, _GREETING_S)
        self.nodes: list[int] = [self._world.node]
        """The node of each rank."""
        self._server: socket.socket | None = None
        if self._world.size > 1:
            self._listen()

    def _listen(self) -> None:
        interface = self._control.interface
        assert interface is not None  # a job of several ranks has one
        self._server = socket.create_server((interface.address, 0), backlog=_ROOM)
        port = self._server.getsockname()[1]
        own = [interface.address, port, self._world.host, self._world.node]
        deadline_s = _CONNECT_S
        token = secrets.token_hex(16) if self._world.rank == 0 else None
        self._token: str = self._control.broadcast("token", token, deadline_s=deadline_s)
        found = self._control.all_gather("addresses", own, deadline_s=deadline_s)
        self._addresses: list[tuple[str, int, str]] = [
            (at, port, name) for at, port, name, _ in found
        ]
        self.nodes = [node for *_, node in found]
        self._server.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="iobench-transport", daemon=True)
        self._thread.start()

    @property
    def control(self) -> Control:
        """The control plane of this transport's users: all ranks make the same calls."""
        return self._control

    def outgoing(self, rank: int) -> Link:
        """Return the link on which this rank sends to `rank`. Raises RankError."""
        if rank not in self._outgoing:
            host, port, name = self._addresses[rank]
            try:
                connection = socket.create_connection((host, port), timeout=_GREETING_S)
                try:
                    self._greet(connection, rank)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, EOFError, ValueError, KeyError) as error:
                self._control.check()
                raise RankError(
                    f"rank {rank} (host {name}) cannot be reached at {host}:{port}: {error}",
                    ranks=[rank],
                ) from error
            self._outgoing[rank] = self._link(connection, rank)
        if self._cut:
            self._outgoing[rank].cut()
        return self._outgoing[rank]

    def incoming(self, rank: int) -> Link:
        """Return the link on which `rank` sends to this rank; wait until it has connected."""
        key, until_s = (self._epoch, rank), time.monotonic() + _CONNECT_S
        with self._changed:
            while key not in self._incoming:
                self._control.check()
                if self._cut:
                    raise RankError(f"rank {rank}: all links were cut", ranks=[rank])
                if time.monotonic() > until_s:
                    raise RankError(
                        f"rank {rank} (host {self._addresses[rank][2]}) did not connect within "
                        f"{_CONNECT_S:g} s",
                        ranks=[rank],
                    )
                self._changed.wait(_LOOK_S)
            return self._incoming[key]

    def cut(self) -> None:
        """End all links, so that no thread and no other rank waits on them. `reset` follows."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()
        for link in self._links():
            link.cut()

    def reset(self) -> None:
        """Make new links when they are used next. All ranks do this after a failure."""
        self.cut()
        with self._changed:
            old = self._links()
            self._outgoing.clear()
            self._epoch += 1
            self._cut = False
            self._incoming = {key: one for key, one in self._incoming.items() if one not in old}
        for link in old:
            link.close()

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        with self._changed:
            self._closed = True
            links = [*self._outgoing.values(), *self._incoming.values()]
            self._outgoing.clear()
            self._incoming.clear()
        for link in links:
            link.cut()
            link.close()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._thread.join()
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _links(self) -> list[Link]:
        with self._changed:
            incoming = [link for (epoch, _), link in self._incoming.items() if epoch <= self._epoch]
            return [*self._outgoing.values(), *incoming]

    def _link(self, connection: socket.socket, rank: int) -> Link:
        return Link(
            connection,
            peer=rank,
            host=self._addresses[rank][2],
            check=self._control.check,
            deadline_s=self._stalled_s,
        )

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closed:
            self._newcomers.end_late()
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._closed:
                    self._newcomers.end_oldest()  # out of descriptors: one becomes free
                    time.sleep(_LOOK_S)
                continue
            # One thread for each: a stranger that says nothing must not keep the ranks waiting.
            self._newcomers.add(connection, partial(_end, connection))
            try:
                threading.Thread(
                    target=self._admit, args=(connection,), name="iobench-admit", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._newcomers.remove(connection)
                connection.close()
                self._newcomers.end_oldest()

    def _admit(self, connection: socket.socket) -> None:
        """Check that a rank of this job is calling, and answer so that it can check this one."""
        connection.settimeout(_GREETING_S)
        nonce = secrets.token_hex(16)
        try:
            connection.sendall(pack({"nonce": nonce}))
            hello = _read(connection)
            rank, epoch = int(hello["rank"]), int(hello["epoch"])
            expected = proof(self._token, nonce, f"{rank} {epoch}")
            if not 0 <= rank < self._world.size or not hmac.compare_digest(
                str(hello["proof"]), expected
            ):
                raise ConnectionError("not a rank of this job")
            self._newcomers.remove(connection)
            answer = proof(self._token, str(hello["nonce"]), f"answer {self._world.rank}")
            link = self._link(connection, rank)
            with self._changed:
                if self._closed or (epoch, rank) in self._incoming or epoch < self._epoch:
                    raise ConnectionError("too late, or a second time")
                connection.sendall(pack({"proof": answer}))
                self._incoming[epoch, rank] = link
                self._changed.notify_all()
        except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError):
            connection.close()  # the caller, if it is a rank, gets an error and reports it
        finally:
            self._newcomers.remove(connection)

    def _greet(self, connection: socket.socket, peer: int) -> None:
        until_s = time.monotonic() + _GREETING_S
        connection.settimeout(_LOOK_S)

        def waiting() -> None:
            self._control.check()  # a stopped process accepts connections, and says nothing
            if time.monotonic() > until_s:
                raise TimeoutError(f"no answer within {_GREETING_S:g} s")

        asked = _read(connection, waiting)
        nonce, rank, epoch = secrets.token_hex(16), self._world.rank, self._epoch
        own = proof(self._token, str(asked["nonce"]), f"{rank} {epoch}")
        connection.sendall(pack({"rank": rank, "epoch": epoch, "nonce": nonce, "proof": own}))
        expected = proof(self._token, nonce, f"answer {peer}")
        if not hmac.compare_digest(str(_read(connection, waiting)["proof"]), expected):
            raise ConnectionError("another job answers here")


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, waiting: Callable[[], None] | None = None) -> Message:
    length = length_of(exactly(connection, PREFIX.size, waiting), hello=True)
    return unpack(exactly(connection, length, waiting))
