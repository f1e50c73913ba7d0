"""Frames: JSON messages with optional bytes, on a socket. Nothing is ever unpickled.

A frame is the magic `iob1`, the length of the JSON text (uint32), the length of the bytes that
follow it (uint64), both big-endian, then the text and the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator

from iobench.errors import ReplicaError
from iobench.ranks.messages import Message
from iobench.units import MIB
from iobench.writers.image import Bytes

__all__ = ["Wire"]

_HEAD = struct.Struct("!4sIQ")
_MAGIC = b"iob1"
_LONGEST_TEXT = MIB
_LONGEST_GREETING = 4096  # nothing is known yet of who sends it


class Wire:
    """One end of a connection, used by one thread at a time.

    Every method raises ReplicaError, which names the other end: for a lost connection, for a wait
    of more than `timeout_s`, and for data that are not frames.
    """

    def __init__(self, connection: socket.socket, other: str, timeout_s: float | None) -> None:
        self.other = other
        self._longest_text = _LONGEST_GREETING
        self._socket = connection
        # Limits of the kernel: with those of Python the socket does not block, and each of the many
        # small arrivals of a slow network would wake Python.
        connection.setblocking(True)
        self.limit(timeout_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self) -> None:
        """Allow longer messages: the other end has proven that it belongs to the job."""
        self._longest_text = _LONGEST_TEXT

    def limit(self, timeout_s: float | None) -> None:
        """Set the longest wait for the other end; None: no limit."""
        self._timeout_s = timeout_s
        seconds = timeout_s or 0.0
        packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, packed)

    def send(self, message: Message, payload: bytes | Bytes = b"") -> None:
        """Send a message, with bytes after it."""
        self.announce(message, len(payload))
        if len(payload):
            with self._errors():
                self._socket.sendall(payload if isinstance(payload, bytes) else payload.data)

    def announce(self, message: Message, length: int) -> None:
        """Send a message whose `length` bytes the caller sends with `send_file`."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._errors():
            self._socket.sendall(_HEAD.pack(_MAGIC, len(text), length) + text)

    def send_file(
        self, fd: int, start: int, stop: int, before: Callable[[int], None], unit: int | None
    ) -> None:
        """Send the bytes [start, stop) of an open file without a copy.

        `before` is called with the size of each part, of at most `unit` bytes.
        """
        while start < stop:
            size = min(stop - start, unit or stop - start)
            before(size)
            end = start + size
            while start < end:
                with self._errors():
                    sent = os.sendfile(self._socket.fileno(), fd, start, end - start)
                if not sent:
                    raise ReplicaError(f"{self.other}: the segment is shorter than its header says")
                start += sent

    def send_fd(self, fd: int) -> None:
        """Pass an open file (SCM_RIGHTS); unix sockets only."""
        with self._errors():
            socket.send_fds(self._socket, [b"f"], [fd])

    def receive_fd(self) -> int:
        """Return the open file that the other end passes."""
        with self._errors():
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(fds) != 1:
            raise ReplicaError(f"{self.other} passed no file")
        os.set_inheritable(fds[0], False)
        return fds[0]

    def receive(self) -> tuple[Message, int] | None:
        """Return the next message and the length of its bytes; None at the end of the connection.

        The caller must take these bytes with `take` or `take_into` before the next message.
        """
        head = self._exactly(_HEAD.size, may_end=True)
        if head is None:
            return None
        magic, length, payload = _HEAD.unpack(head)
        if magic != _MAGIC or length > self._longest_text:
            raise ReplicaError(f"{self.other} sends something other than frames of iobench")
        text = self._exactly(length)
        try:
            message = json.loads(text or b"")
        except (ValueError, RecursionError) as error:
            raise ReplicaError(f"{self.other} sends a damaged message: {error}") from error
        if not isinstance(message, dict):
            raise ReplicaError(f"{self.other} sends a damaged message: not an object")
        return message, payload

    def answer(self, most: int = 0) -> tuple[Message, bytes]:
        """Return the next message and its bytes, at most `most`. Raises its `error`, if any."""
        message, length = self.header()
        return message, self.take(length, most)

    def header(self) -> tuple[Message, int]:
        """Return the next message, whose bytes the caller takes. Raises its `error`, if any."""
        found = self.receive()
        if found is None:
            raise ReplicaError(f"{self.other} closed the connection")
        if error := found[0].get("error"):
            raise ReplicaError(f"{self.other}: {error}")
        return found

    def take(self, length: int, most: int) -> bytes:
        """Return the `length` bytes of a message. Raises ReplicaError for more than `most`."""
        if length > most:
            raise ReplicaError(f"{self.other} sends {length} bytes, at most {most} are allowed")
        return bytes(self._exactly(length) or b"")

    def take_into(self, memory: Bytes) -> None:
        """Receive bytes of a message into `memory`."""
        view, done = memoryview(memory.data), 0
        while done < len(view):
            with self._errors():
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ReplicaError(f"{self.other} closed the connection")
            done += count

    def end(self) -> None:
        """End the connection; a thread that waits on it gets ReplicaError, and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a thread that waits on it ends."""
        self.end()
        self._socket.close()

    def _exactly(self, length: int, *, may_end: bool = False) -> bytearray | None:
        memory = bytearray(length)
        view, done = memoryview(memory), 0
        while done < length:
            with self._errors():
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                if may_end and not done:
                    return None
                raise ReplicaError(f"{self.other} closed the connection")
            done += count
        return memory

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise ReplicaError(f"{self.other} does not answer for {self._timeout_s} s") from error
        except OSError as error:
            raise ReplicaError(f"{self.other}: {error.strerror or error}") from error
