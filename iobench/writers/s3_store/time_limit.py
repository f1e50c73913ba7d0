"""TimeLimit: ends the requests of an S3 client that are in progress after some seconds."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["THREAD", "TimeLimit"]

THREAD = "iobench-time-limit"
"""Name of the thread that waits for the end of the limit."""
_SHORTEST_S = 0.001


class TimeLimit:
    """The limit of all requests of one boto3 client, while one is set.

    A timeout of the socket counts from byte to byte, for each attempt: requests with many parts and
    attempts have no common limit. At its end the sockets are shut down, which wakes the threads
    that wait for the server.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save in the same thread
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._stops: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._passed = threading.Event()
        self._until_s, self._lifted = math.inf, False

    @property
    def passed(self) -> bool:
        """Whether the limit of the `within` that is entered has passed."""
        return self._passed.is_set()

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """End what still runs in the body after `limit_s` seconds. Not for two threads at once.

        An upload that fails cannot be aborted in the body: use `leaving_failed` too. There is no
        limit if the interpreter ends and refuses new threads.
        """
        timer = threading.Timer(limit_s, self._end)
        timer.name, timer.daemon = THREAD, True
        self._until_s, self._lifted = time.monotonic() + limit_s, False
        try:
            timer.start()
        except RuntimeError:
            self._until_s = math.inf
            yield
            return
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._until_s = math.inf
            self._passed.clear()

    def lift(self) -> bool:
        """Go on without a limit in the `within` that is entered. Return False if it has passed."""
        with self._lock:
            if not self.passed:
                self._until_s, self._lifted = math.inf, True
            return self._lifted

    def wait(self, seconds: float, stop: threading.Event | None) -> bool:
        """Wait between two attempts; return True as soon as `stop` is set or the limit passed.

        `stop` is set when the limit passes.
        """
        if stop is None:
            return self._passed.wait(seconds)
        with self._lock:
            if self.passed:
                return True
            self._stops.add(stop)
        return stop.wait(seconds)

    def apply_to(self, client: Any) -> None:
        """Make this the limit of a boto3 client that has no connections yet.

        botocore has no option for this.
        """
        pools = client._endpoint.http_session._pool_classes_by_scheme
        for scheme, pool in list(pools.items()):
            connection = _limited(pool.ConnectionCls, self)
            pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})

    def at_most(self, timeout_s: float) -> float:
        """Return the timeout of a connection that begins now: no socket exists to shut down."""
        return min(timeout_s, max(self._until_s - time.monotonic(), _SHORTEST_S))

    def connected(self, sock: socket.socket) -> None:
        """Add the socket of a new connection."""
        with self._lock:
            self._sockets.add(sock)
            if self.passed:
                _shut_down(sock)

    def _end(self) -> None:
        with self._lock:
            if self._lifted:
                return
            self._passed.set()
            for sock in self._sockets:
                _shut_down(sock)
            for stop in self._stops:
                stop.set()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed, or not connected any more
        # Not the method of an SSLSocket: what is sent after that one is not encrypted.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _limited(connection: Any, limit: TimeLimit) -> Any:
    """Return a subclass of botocore's `connection` that adds its sockets to `limit`."""

    class LimitedConnection(connection):  # type: ignore[misc]  # known at run time only
        sock: Any
        timeout: Any

        def connect(self) -> None:
            usual_s = self.timeout  # of the request's body too
            self.timeout = limit.at_most(usual_s)
            try:
                super().connect()
            finally:
                self.timeout = usual_s
            self.sock.settimeout(usual_s)
            limit.connected(self.sock)

    return LimitedConnection
