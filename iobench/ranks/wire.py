"""Wire: one connection that carries messages, each with optional bytes. Nothing is ever unpickled.

A message is the magic `iob1`, the length of its JSON text (uint32) and that of the bytes after it
(uint64), both big-endian, then the text and the bytes. All connections of a job use it: those to
rank 0, and those between ranks.

Both ends prove that they know the token of the job. It is not sent: each end sends a random number
and answers the other's with an HMAC-SHA256. What follows is not encrypted; the network of a job is
trusted to carry it.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import math
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar, Union

import msgspec

from iobench.errors import IobenchError
from iobench.units import MIB
from iobench.writers.image import Bytes

HEAD = struct.Struct("!4sIQ")
"""In front of a message: the magic, the length of the text and that of the bytes."""

_MAGIC = b"iob1"
_LONGEST_TEXT = 64 * MIB
_LONGEST_GREETING = 4096  # nothing is known yet of who sends it
_LOOK_S = 1.0
_MOST_BUFFERS = 512  # a system call takes up to 1024 (IOV_MAX in limits.h)


class Message(msgspec.Struct, tag=str.lower, tag_field="type", omit_defaults=True):
    """A message is a subclass. A class with others below it stands for any of them."""


class Challenge(Message):
    """The first message on a connection, by the end that listens."""

    nonce: str


class Hello(Message):
    """The answer to a `Challenge`. What it says of the caller is part of the proof."""

    nonce: str
    proof: str = ""
    rank: int = 0
    host: str = ""


class Welcome(Message):
    """The answer to a `Hello` with a valid proof."""

    proof: str
    host: str = ""


class Refusal(Message):
    """An answer that says why there is none."""

    error: str


M = TypeVar("M", bound=Message)
_encode = msgspec.json.Encoder().encode


def pack(message: Message, length: int = 0) -> bytes:
    """Return what is sent of a message before its `length` bytes."""
    text = _encode(message)
    return HEAD.pack(_MAGIC, len(text), length) + text


def lengths(head: bytes | bytearray, *, stranger: bool = False) -> tuple[int, int]:
    """Return the lengths of the text and of the bytes after it.

    Raises ConnectionError for what is not a message. A `stranger`, who has proven nothing yet, may
    send a short one without bytes.
    """
    magic, text, payload = HEAD.unpack(head)
    if magic != _MAGIC or text > (_LONGEST_GREETING if stranger else _LONGEST_TEXT):
        raise ConnectionError("sends something other than messages of iobench")
    if stranger and payload:
        raise ConnectionError(f"sends {payload} bytes before it has proven who it is")
    return text, payload


def decoded(text: bytes | bytearray, kind: type[M]) -> M | Refusal:
    """Return the message, of `kind` or a class below it, or a Refusal.

    Raises ConnectionError for anything else.
    """
    try:
        return _decoder(kind).decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConnectionError(f"sends a damaged message: {error}") from error


@functools.cache
def _decoder(kind: type[M]) -> msgspec.json.Decoder[M | Refusal]:
    kinds: Any = (Refusal, *_kinds(kind))
    return msgspec.json.Decoder(Union[kinds])  # noqa: UP007 -- of a tuple that is not written out


def _kinds(kind: type[Message]) -> list[type[Message]]:
    below = kind.__subclasses__()
    return [leaf for one in below for leaf in _kinds(one)] if below else [kind]


def sendable(text: str) -> str:
    """Return `text` with escapes for what is not UTF-8, as in names of files."""
    return text.encode("utf-8", "backslashreplace").decode()


class Wire:
    """One end of a connection. One thread at a time sends, and one receives.

    Every method raises what `failure` makes of a text that names the `other` end: for a lost
    connection, for one on which no byte moves for `timeout_s` (None: no limit), for data that are
    not messages, and for a Refusal. `check` is called every second of a wait, and may raise.

    In a forked child the connection is closed, see `_close_in_child`.
    """

    def __init__(
        self,
        connection: socket.socket,
        other: str,
        timeout_s: float | None = None,
        *,
        failure: Callable[[str], Exception] = ConnectionError,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.other, self.failure = other, failure
        self._socket, self._trusted = connection, False
        # Blocking calls with time limits of the kernel: a whole piece takes one call. With those of
        # Python the socket does not block, and each of the many small arrivals wakes Python.
        # No SO_RCVBUF: it would switch off the kernel's own tuning, which goes up to tcp_rmem[2],
        # and be cut to net.core.rmem_max, 208 KiB by default.
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # For a host that vanishes while a wait has no time limit: the kernel asks it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.limit(timeout_s, check)
        _sockets.add(connection)

    def limit(
        self,
        timeout_s: float | None,
        check: Callable[[], None] | None = None,
        *,
        send_s: float | None = None,
    ) -> None:
        """Set the longest time without a byte, and that of sends if it is another one."""
        self._check = check
        self._receive_s, self._send_s = timeout_s, timeout_s if send_s is None else send_s
        for option, wait_s in (
            (socket.SO_RCVTIMEO, self._receive_s),
            (socket.SO_SNDTIMEO, self._send_s),
        ):
            look_s = min(wait_s or math.inf, math.inf if check is None else _LOOK_S)
            look_s = 0.0 if look_s == math.inf else look_s
            packed = struct.pack("ll", int(look_s), int(look_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, packed)

    def trust(self) -> None:
        """Allow longer messages: the other end has proven that it belongs to the job."""
        self._trusted = True

    def failed(self, what: str) -> Exception:
        """Return the error that says `what` the other end does."""
        return self.failure(f"{self.other} {what}")

    def send(self, message: Message, *payload: bytes | Bytes) -> None:
        """Send a message, with bytes after it. The memory may change after the return."""
        views = [memoryview(one if isinstance(one, bytes) else one.data) for one in payload]
        head = memoryview(pack(message, sum(map(len, views))))
        self._move(self._socket.sendmsg, [head, *views], self._send_s, "take")

    def receive(self, kind: type[M]) -> tuple[M, int]:
        """Return the next message and the length of its bytes.

        The caller must take these bytes with `take` or `take_into` before the next message.
        """
        head = self.take(HEAD.size)
        try:
            length, payload = lengths(head, stranger=not self._trusted)
            message = decoded(self.take(length), kind)
        except ConnectionError as error:
            raise self.failed(str(error)) from error
        if isinstance(message, Refusal):
            raise self.failure(f"{self.other}: {message.error}")
        return message, payload

    def take(self, length: int) -> bytearray:
        """Return the `length` bytes of a message."""
        memory = bytearray(length)
        self._receive([memoryview(memory)])
        return memory

    def take_into(self, *memory: Bytes) -> None:
        """Receive the bytes of a message into `memory`."""
        self._receive(one.data for one in memory)

    def end(self) -> None:
        """End the connection in both directions; a thread that waits on it gets an error."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End and free the connection; no thread may use it any more."""
        self.end()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def detach(self) -> socket.socket:
        """Return the socket, which belongs to the caller now, without time limits."""
        self.limit(None)
        return self._socket

    def _receive(self, views: Iterable[memoryview]) -> None:
        def some(batch: Sequence[memoryview]) -> int:
            return self._socket.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

        self._move(some, views, self._receive_s, "send")

    def _move(
        self,
        some: Callable[[Sequence[memoryview]], int],
        views: Iterable[memoryview],
        timeout_s: float | None,
        verb: str,
    ) -> None:
        """Move all bytes of `views`."""
        left = filter(len, views)
        batch: list[memoryview] = []
        moved_s = time.monotonic()
        while True:
            batch += itertools.islice(left, _MOST_BUFFERS - len(batch))
            if not batch:
                return
            try:
                count = some(batch)
            except BlockingIOError:  # nothing moved
                if self._check is not None:
                    self._check()
                if timeout_s is not None and time.monotonic() - moved_s >= timeout_s:
                    raise self.failed(f"did not {verb} a byte for {timeout_s:g} s") from None
                continue
            except OSError as error:
                raise self.failed(f"ended the connection ({error.strerror or error})") from error
            if not count:
                raise self.failed("closed the connection")
            moved_s = time.monotonic()
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            if batch:
                batch[0] = batch[0][count:]
                if self._check is not None:  # also for one who sends a byte now and then
                    self._check()


def introduce(wire: Wire, token: bytes, purpose: str, *, rank: int = 0, host: str = "") -> Welcome:
    """Prove who this is to the end that listens for `purpose`, and check that it knows the token.

    Raises what `wire` raises when either end does not accept the other.
    """
    challenge, _ = wire.receive(Challenge)
    own = Hello(nonce=secrets.token_hex(16), rank=rank, host=host)
    proof = _proof(token, f"{purpose} client", challenge.nonce, own)
    wire.send(msgspec.structs.replace(own, proof=proof))
    welcome, _ = wire.receive(Welcome)
    expected = _proof(token, purpose, challenge.nonce, own)
    if not hmac.compare_digest(welcome.proof.encode(), expected.encode()):
        raise wire.failed("belongs to another job: its proof is wrong")
    wire.trust()
    return welcome


def welcome_for(
    hello: Hello, token: bytes, purpose: str, nonce: str, *, host: str
) -> Welcome | None:
    """Return the answer of the end that listens and sent `nonce`; None for another token."""
    expected = _proof(token, f"{purpose} client", nonce, hello)
    if not hmac.compare_digest(hello.proof.encode(), expected.encode()):
        return None
    return Welcome(proof=_proof(token, purpose, nonce, hello), host=host)


def _proof(token: bytes, role: str, nonce: str, hello: Hello) -> str:
    """Return what only a holder of `token` can compute from the random numbers of both ends."""
    facts = [role, nonce, hello.nonce, hello.rank, hello.host]
    return hmac.digest(token, _encode(facts), "sha256").hex()


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all sockets in a forked child, such as a worker of a data loader.

    It may live longer than this process, whose end the other ranks would not notice. If it listened
    too, it would take connections that it never answers.
    """
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


_PAUSE_S = 0.1


class Listener:
    """Serves the handshake on `server`, a socket that listens, until `close`.

    `admit` is called in a thread of its own for each end that proves that it knows `token`. It must
    send the Welcome, and owns the wire then; if it raises, the connection is closed.

    Anyone on the network may connect. Without limits, connections that say nothing, or one byte in
    a while, would take all descriptors of the process. So at most `most` may be unproven, the
    oldest one is ended for a new one, and none may take longer than `greeting_s`.
    """

    def __init__(
        self,
        server: socket.socket,
        *,
        token: bytes,
        purpose: str,
        admit: Callable[[Wire, Hello, Welcome], None],
        most: int,
        greeting_s: float,
        host: str = "",
    ) -> None:
        self._server, self._token, self._purpose, self._host = server, token, purpose, host
        _sockets.add(server)
        self._admit, self._most, self._greeting_s = admit, most, greeting_s
        self._strangers: dict[Wire, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="iobench-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the unproven connections. The others stay."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._server.close()
        while self._end_oldest():
            pass

    def _accept(self) -> None:
        while not self._closed:
            connection = None
            try:
                connection, _ = self._server.accept()
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
        except (IobenchError, OSError, RuntimeError):
            wire.close()
        finally:
            with self._lock:
                self._strangers.pop(wire, None)


def _name_of(connection: socket.socket) -> str:
    try:
        return f"the peer {connection.getpeername()[0]}"
    except OSError:  # it has ended already
        return "a peer that has left"
