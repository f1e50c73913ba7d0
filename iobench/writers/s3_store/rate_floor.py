"""RateFloor: the floor on the rate of every answer of an S3 client; used by `S3Client`.

A timeout of the socket counts from byte to byte. An answer of one byte per second would never end.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from typing import Any

from iobench.units import KIB

__all__ = ["RateFloor", "SlowAnswerError", "set_rate_floor"]

_SLOWEST = KIB  # bytes per second; an answer that arrives more slowly has failed
# While S3 completes an upload, it sends the header and then a space now and then. That takes
# several minutes for a large object (API reference of CompleteMultipartUpload).
_COMPLETION_S = 900.0


class SlowAnswerError(TimeoutError):
    """An answer that arrives at less than 1 KiB/s. Transient."""


class RateFloor:
    """Checks the rate of one answer from its first byte on.

    Raises SlowAnswerError after `window_s` seconds below 1 KiB/s. The time that the server needs
    before its first byte does not count: the socket's timeout limits it.
    """

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        self._since_s: float | None = None
        self._bytes = 0

    def arrived(self, size_bytes: int) -> None:
        """Count bytes that have just arrived."""
        now_s = self._clock()
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


def set_rate_floor(client: Any, window_s: float) -> None:
    """Check the rate of every answer to the boto3 client: header and body, also of errors.

    botocore has no option for this, and it reads an answer that is no object's body until the end.
    """
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in list(pools.items()):
        connection = _paced(pool.ConnectionCls, window_s)
        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})


def _paced(connection: Any, window_s: float) -> Any:
    """Return a subclass of botocore's `connection` whose socket checks the rate of answers."""

    class PacedConnection(connection):  # type: ignore[misc]  # known at run time only
        sock: Any
        _answer_s = window_s

        def connect(self) -> None:
            super().connect()
            self.sock = _PacedSocket(self.sock, self._answer_s)

        def request(self, method: str, url: str, *rest: Any, **named: Any) -> Any:
            completes = method == "POST" and "uploadId=" in url
            self._answer_s = max(window_s, _COMPLETION_S) if completes else window_s
            if self.sock is not None:  # the connection is reused
                self.sock.answer_s = self._answer_s
            return super().request(method, url, *rest, **named)

    return PacedConnection


class _PacedSocket:
    """A socket whose `makefile`, from which http.client reads one answer, checks the rate."""

    def __init__(self, inner: socket.socket, answer_s: float) -> None:
        self._inner = inner
        self.answer_s = answer_s

    def makefile(self, mode: str, buffering: int | None = None) -> io.IOBase:
        assert mode == "rb"
        answer = _Answer(self._inner.makefile("rb", 0), RateFloor(self.answer_s))
        return answer if buffering == 0 else io.BufferedReader(answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Answer(io.RawIOBase):
    """The bytes of one answer, each receive checked.

    Checked below the buffer: `BufferedReader` waits until a line or a block is complete, however
    slowly the bytes arrive.
    """

    def __init__(self, raw: Any, floor: RateFloor) -> None:
        super().__init__()
        self._raw, self._floor = raw, floor

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        number: int = self._raw.fileno()
        return number

    def readinto(self, buffer: Any) -> int | None:
        count: int | None = self._raw.readinto(buffer)
        if count:
            self._floor.arrived(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
