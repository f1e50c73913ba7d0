"""The connections of an S3 client: one time limit for all requests, and a floor on the rate of each
answer.

botocore has no option for either. A timeout of its sockets counts from byte to byte, for each
attempt: requests with many parts and attempts have no common limit, and an answer of one byte per
second would never end.
"""

from __future__ import annotations

import contextlib
import io
import math
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from iobench.errors import TransferError
from iobench.units import KIB

THREAD = "iobench-time-limit"
"""Name of the thread that waits for the end of the limit."""
_SHORTEST_S = 0.001
_SLOWEST = KIB  # bytes per second; an answer that arrives more slowly has failed
# While S3 completes an upload, it sends the header and then a space now and then. That takes
# several minutes for a large object (API reference of CompleteMultipartUpload).
_COMPLETION_S = 900.0


_leaving: ContextVar[bool] = ContextVar("iobench_leaving_failed_uploads", default=False)


def leaves_failed() -> bool:
    """Return whether this thread is inside `TimeLimit.within`, of any client."""
    return _leaving.get()


class TimeLimit:
    """The limit of all requests of one boto3 client, while one is set.

    At its end the sockets are shut down, which wakes the threads that wait for the server.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save in the same thread
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._stops: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._passed = threading.Event()
        self._until_s = math.inf

    @property
    def passed(self) -> bool:
        """Whether the limit of the `within` that is entered has passed."""
        return self._passed.is_set()

    @contextmanager
    def within(self, limit_s: float | None, late: str = "") -> Iterator[None]:
        """End what still runs in the body after `limit_s` seconds. Not for two threads at once.

        A TransferError of the body has the text `late` then. None: no other limit than that of a
        `within` around it. There is none if the interpreter ends and refuses new threads. What
        fails in the body leaves its uploads and objects to somebody who tidies up later: a server
        that does not answer would make the clean-up wait for its timeouts once more.
        """
        before = _leaving.set(True)
        try:
            if limit_s is None:
                yield
            else:
                with self._limited(limit_s):
                    try:
                        yield
                    except TransferError as error:
                        if not (late and self.passed):
                            raise
                        raise TransferError(late) from error
        finally:
            _leaving.reset(before)

    @contextmanager
    def _limited(self, limit_s: float) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._end)
        timer.name, timer.daemon = THREAD, True
        self._until_s = time.monotonic() + limit_s
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
                self._until_s = math.inf
            return not self.passed

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
            if math.isinf(self._until_s):  # it was lifted
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


class SlowAnswerError(TimeoutError):
    """An answer that arrives at less than 1 KiB/s. Transient."""


def guard_connections(client: Any, limit: TimeLimit, window_s: float) -> None:
    """Apply both to a boto3 client that has no connections yet.

    The rate is that of header and body, also of errors: botocore reads an answer that is no
    object's body until the end.
    """
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in list(pools.items()):
        connection = _guarded(pool.ConnectionCls, limit, window_s)
        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})


def _guarded(connection: Any, limit: TimeLimit, window_s: float) -> Any:
    """Return a subclass of botocore's `connection` whose sockets have both limits."""

    class GuardedConnection(connection):  # type: ignore[misc]  # known at run time only
        sock: Any
        timeout: Any
        _answer_s = window_s

        def connect(self) -> None:
            usual_s = self.timeout  # of the request's body too
            self.timeout = limit.at_most(usual_s)
            try:
                super().connect()
            finally:
                self.timeout = usual_s
            self.sock.settimeout(usual_s)
            limit.connected(self.sock)
            self.sock = _GuardedSocket(self.sock, self._answer_s)

        def request(self, method: str, url: str, *rest: Any, **named: Any) -> Any:
            completes = method == "POST" and "uploadId=" in url
            self._answer_s = max(window_s, _COMPLETION_S) if completes else window_s
            if self.sock is not None:  # the connection is reused
                self.sock.answer_s = self._answer_s
            return super().request(method, url, *rest, **named)

    return GuardedConnection


class _GuardedSocket:
    """A socket whose `makefile`, from which http.client reads one answer, checks the rate."""

    def __init__(self, inner: socket.socket, answer_s: float) -> None:
        self._inner = inner
        self.answer_s = answer_s

    def makefile(self, mode: str, buffering: int | None = None) -> io.IOBase:
        assert mode == "rb"
        answer = _Answer(self._inner.makefile("rb", 0), self.answer_s)
        return answer if buffering == 0 else io.BufferedReader(answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Answer(io.RawIOBase):
    """The bytes of one answer. Raises SlowAnswerError after `window_s` seconds below 1 KiB/s.

    The time before the first byte does not count: the socket's timeout limits it. The rate is
    checked below the buffer: `BufferedReader` waits until a line or a block is complete, however
    slowly the bytes arrive.
    """

    def __init__(self, raw: Any, window_s: float) -> None:
        super().__init__()
        self._raw, self._window_s = raw, window_s
        self._since_s: float | None = None
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        number: int = self._raw.fileno()
        return number

    def readinto(self, buffer: Any) -> int | None:
        count: int | None = self._raw.readinto(buffer)
        if count:
            self._arrived(count, time.monotonic())
        return count

    def _arrived(self, size_bytes: int, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        self._bytes += size_bytes
        passed_s = now_s - self._since_s
        if passed_s < self._window_s:
            return
        if self._bytes < _SLOWEST * passed_s:
            raise SlowAnswerError(
                f"{self._bytes} bytes arrived in {passed_s:.1f} s, less than 1 KiB/s"
            )
        self._since_s, self._bytes = now_s, 0

    def close(self) -> None:
        self._raw.close()
        super().close()
