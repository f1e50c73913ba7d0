"""Link: one direction of bytes from one rank to another, over a TCP connection."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from iobench.errors import RankError
from iobench.writers.image import Bytes

__all__ = ["Link", "exactly"]

_HEADER = struct.Struct("!QQ")
_LOOK_S = 1
_MOST_BUFFERS = 512  # a system call takes up to 1024 (IOV_MAX in limits.h)


class Link:
    """Sends or receives numbered pieces to or from rank `peer`. One thread uses it at a time.

    `check` raises RankError when the job is broken; a wait calls it every second. A link on which
    no byte moves for `deadline_s` raises RankError too.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        peer: int,
        host: str,
        check: Callable[[], None],
        deadline_s: float,
    ) -> None:
        self.peer, self.host = peer, host
        self._connection, self._check, self._deadline_s = connection, check, deadline_s
        # Blocking calls with a time limit of the kernel: a whole piece takes one call. With
        # settimeout, Python's sockets do not block, and each call moves what is in the buffer.
        # No SO_RCVBUF: it would switch off the kernel's own tuning, which goes up to tcp_rmem[2],
        # and be cut to net.core.rmem_max, 208 KiB by default.
        connection.settimeout(None)
        limit = struct.pack("ll", _LOOK_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, views: Sequence[Bytes]) -> None:
        """Send the piece `number`. The memory may change after the return. Raises RankError."""
        size = sum(map(len, views))
        header = memoryview(_HEADER.pack(number, size))
        self._move(self._send_some, [header, *(view.data for view in views)], "take")

    def receive(self, views_of: Callable[[int, int], Sequence[Bytes]]) -> int:
        """Receive a piece and return its number.

        `views_of(number, bytes)` returns the memory for it, of this size. Raises RankError.
        """
        header = bytearray(_HEADER.size)
        self._move(self._receive_some, [memoryview(header)], "send")
        number, size = _HEADER.unpack(header)
        self._move(self._receive_some, (view.data for view in views_of(number, size)), "send")
        return int(number)

    def cut(self) -> None:
        """End the connection in both directions: a wait of another thread raises RankError."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the connection; no thread may use it any more."""
        self._connection.close()

    def _move(
        self,
        some: Callable[[Sequence[memoryview]], int],
        views: Iterable[memoryview],
        verb: str,
    ) -> None:
        left = iter(views)
        batch: list[memoryview] = []
        moved_s = time.monotonic()
        while True:
            batch += itertools.islice(left, _MOST_BUFFERS - len(batch))
            if not batch:
                return
            try:
                count = some(batch)
            except BlockingIOError:  # nothing moved within _LOOK_S
                self._check()
                if time.monotonic() - moved_s > self._deadline_s:
                    raise self._failed(
                        f"did not {verb} a byte for {self._deadline_s:g} s"
                    ) from None
                continue
            except OSError as error:
                raise self._failed(f"ended the connection ({error.strerror or error})") from error
            if not count:
                raise self._failed("ended the connection")
            moved_s = time.monotonic()
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            if count:
                batch[0] = batch[0][count:]

    def _send_some(self, batch: Sequence[memoryview]) -> int:
        return self._connection.sendmsg(batch)

    def _receive_some(self, batch: Sequence[memoryview]) -> int:
        return self._connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

    def _failed(self, what: str) -> RankError:
        return RankError(f"rank {self.peer} (host {self.host}) {what}", ranks=[self.peer])


def exactly(
    connection: socket.socket, size: int, waiting: Callable[[], None] | None = None
) -> bytes:
    """Receive `size` bytes. Raises EOFError when the connection ends before, and OSError.

    `waiting` is called whenever nothing came within the timeout of the connection. It raises if
    there is no more reason to wait. Without it, TimeoutError is raised.
    """
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except TimeoutError:
            if waiting is None:
                raise
            waiting()
            continue
        if not part:
            raise EOFError("the connection ended")
        data += part
    return bytes(data)
