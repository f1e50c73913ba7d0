"""Listener: accepts connections, and hands on those whose other end proves the token of the job."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from iobench.errors import IobenchError
from iobench.ranks.wire import Challenge, Hello, Refusal, Welcome, Wire, welcome_for

__all__ = ["Listener"]

_PAUSE_S = 0.1


class Listener:
    """Serves the handshake on `servers`, sockets that listen, until `close`.

    `admit` is called in a thread of its own for each end that proves that it knows `token`. It must
    send the Welcome, and owns the wire then; if it raises, the connection is closed.

    Anyone on the network may connect. Without limits, connections that say nothing, or one byte in
    a while, would take all descriptors of the process. So at most `most` may be unproven, the
    oldest one is ended for a new one, and none may take longer than `greeting_s`.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        *,
        token: bytes,
        purpose: str,
        admit: Callable[[Wire, Hello, Welcome], None],
        most: int,
        greeting_s: float,
        host: str = "",
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._servers, self._token, self._purpose, self._host = servers, token, purpose, host
        self._admit, self._most, self._greeting_s, self._log = admit, most, greeting_s, log
        self._strangers: dict[Wire, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._accept, args=(one,), name="iobench-accept", daemon=True)
            for one in servers
        ]
        for thread in self._threads:
            thread.start()
        _listeners.add(self)

    def close(self) -> None:
        """Stop listening and end the unproven connections. The others stay."""
        self._closed = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.close()
        while self._end_oldest():
            pass

    def _accept(self, server: socket.socket) -> None:
        while not self._closed:
            connection = None
            try:
                connection, _ = server.accept()
                # One thread for each: a stranger that says nothing keeps no rank waiting.
                threading.Thread(
                    target=self._greet, args=(connection,), name="iobench-greet", daemon=True
                ).start()
            except (OSError, RuntimeError):  # out of descriptors or threads: one becomes free
                if connection is not None:
                    connection.close()
                if not self._closed:
                    self._end_oldest()
                    time.sleep(_PAUSE_S)

    def _end_oldest(self) -> bool:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                oldest.end()
        return oldest is not None

    def _greet(self, connection: socket.socket) -> None:
        until_s = time.monotonic() + self._greeting_s

        def check() -> None:
            if time.monotonic() > until_s:
                raise wire.failed("takes too long to prove who it is")

        try:
            wire = Wire(connection, _name_of(connection), self._greeting_s, check=check)
        except OSError:  # it has ended already
            connection.close()
            return
        with self._lock:
            self._strangers[wire] = None
            excess = len(self._strangers) > self._most
        if excess:
            self._end_oldest()
        try:
            nonce = secrets.token_hex(16)
            wire.send(Challenge(nonce))
            hello, _ = wire.receive(Hello)
            welcome = welcome_for(hello, self._token, self._purpose, nonce, host=self._host)
            if welcome is None:
                wire.send(Refusal("wrong token: this is another job"))
                raise wire.failed("came with a wrong token")
            wire.trust()
            wire.limit(None)
            with self._lock:
                ended = self._strangers.pop(wire, wire) is wire
            if ended:  # for a newer one
                raise wire.failed("took too long to prove who it is")
            self._admit(wire, hello, welcome)
        except (IobenchError, OSError, RuntimeError) as error:
            wire.close()
            self._log(str(error))
        finally:
            with self._lock:
                self._strangers.pop(wire, None)


def _name_of(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return "a rank of this node"
    try:
        return f"the peer {connection.getpeername()[0]}"
    except OSError:  # it has ended already
        return "a peer that has left"


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that listens too would take connections that it never answers."""
    for listener in list(_listeners):
        for server in listener._servers:
            server.close()


os.register_at_fork(after_in_child=_close_in_child)
