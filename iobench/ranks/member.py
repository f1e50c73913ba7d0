"""Member: the connection of one rank to the hub."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from iobench.errors import RankError, UsageError
from iobench.ranks.messages import (
    PREFIX,
    Message,
    length_of,
    pack,
    proof,
    split,
    suspended_s,
    unpack,
)

__all__ = ["Member"]

_GREETING_S = 30.0


class Member:
    """Sends the calls of this rank, and hands the hub's answers to the threads that wait for them.

    A thread receives; another sends a sign of life. `RankError` is raised by every call after a
    rank was lost, and names it.
    """

    def __init__(
        self, connection: socket.socket, *, rank: int, token: str, host: str, lost_after_s: float
    ) -> None:
        self._connection, self._rank, self._lost_after_s = connection, rank, lost_after_s
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[tuple[str, int], Message] = {}
        self._broken: RankError | None = None
        self._closed = False
        self._heard_s = time.monotonic()
        self._phase = "connect"
        self._hub_host = _greet(connection, rank, token, host, min(_GREETING_S, lost_after_s))
        seconds = int(max(1, lost_after_s))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
        for name, work in (("receive", self._receive), ("alive", self._beat)):
            threading.Thread(target=work, name=f"iobench-{name}", daemon=True).start()
        _members.add(self)

    def call(self, message: Message, deadline_s: float) -> Message:
        """Send a call and return the hub's answer to it. Raises RankError.

        The hub keeps the deadline. This rank waits a little longer for its answer.
        """
        return self.begin(message, deadline_s)()

    def begin(
        self, message: Message, deadline_s: float, values: bytes | None = None
    ) -> Callable[[], Message]:
        """Send a call. Return a function that waits for the hub's answer; see `call`.

        `values` is the JSON of what this rank gives. The answer has that of all ranks in `values`.
        """
        key = (str(message["sub"]), int(message["number"]))
        self.check()
        if not message.get("aside"):
            self._phase = str(message.get("phase", self._phase))
        self._send(message, values)
        return partial(self._answer, key, time.monotonic() + deadline_s + self._lost_after_s)

    def _answer(self, key: tuple[str, int], until_s: float) -> Message:
        now_s = listening_s = time.monotonic()
        with self._changed:
            while key not in self._answers:
                self.check()
                silent_s = now_s - max(self._heard_s, listening_s)
                if silent_s > self._lost_after_s or now_s > until_s:
                    self._break_hub(f"is silent for {silent_s:.0f} s")
                    continue
                self._changed.wait(min(1.0, self._lost_after_s / 4))
                before_s, now_s = now_s, time.monotonic()
                if now_s - before_s > suspended_s(self._lost_after_s):
                    listening_s, until_s = now_s, until_s + now_s - before_s
            return self._answers.pop(key)

    def ping(self, number: int) -> tuple[float, float, float]:
        """Return the monotonic times before, at the hub and after. Raises RankError."""
        sent_s = time.monotonic()
        answer = self.call({"type": "ping", "sub": "ping", "number": number}, self._lost_after_s)
        return sent_s, float(answer["at_s"]), float(answer["received_s"])

    @property
    def broken(self) -> bool:
        """Whether a rank was lost."""
        return self._broken is not None

    def fail(self, error: str, exit_code: int = RankError.exit_code) -> None:
        """Tell the other ranks that this one cannot go on."""
        with contextlib.suppress(RankError):
            self._send({"type": "fail", "error": error, "exit_code": exit_code})

    def close(self) -> None:
        """Say that this rank needs the others no more, and close the connection."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(RankError):
                self._send({"type": "close"})
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def check(self) -> None:
        """Raise RankError if a rank was lost, and UsageError after `close`."""
        if os.getpid() != self._pid:
            raise UsageError("the connection to the other ranks does not work in a forked child")
        if self._broken:
            broken = self._broken
            raise RankError(*broken.args, ranks=broken.ranks, exit_code=broken.exit_code)
        if self._closed:
            raise UsageError("the connection to the other ranks is closed")

    def _send(self, message: Message, values: bytes | None = None) -> None:
        data = pack(message, values)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError as error:
            with self._changed:
                if self._broken is None:
                    self._break_hub(f"cannot be reached: {error}")
                self.check()

    def _receive(self) -> None:
        try:
            while True:
                message, values = split(_read(self._connection))
                self._heard_s = time.monotonic()
                if message.get("acknowledge") and self._rank:
                    with contextlib.suppress(RankError, UsageError):
                        key = {"sub": message["sub"], "number": message["number"]}
                        self._send({"type": "acknowledge", **key})
                # After that: this process may end as soon as a call returns.
                self._take({**message, "values": values})
        except (OSError, EOFError, KeyError, ValueError, TypeError):
            with self._changed:
                if not self._closed and self._broken is None:
                    self._break_hub("ended")
                self._changed.notify_all()
            with contextlib.suppress(OSError):  # closed already
                self._connection.shutdown(socket.SHUT_RDWR)

    def _take(self, message: Message) -> None:
        with self._changed:
            match message["type"]:
                case "answer":
                    self._answers[str(message["sub"]), int(message["number"])] = message
                case "pong":
                    message["received_s"] = self._heard_s
                    self._answers["ping", int(message["number"])] = message
                case "broken" if self._broken is None:
                    self._broken = RankError(
                        str(message["message"]),
                        ranks=message["ranks"],
                        exit_code=int(message["exit_code"]),
                    )
            self._changed.notify_all()

    def _beat(self) -> None:
        """Send a sign of life, and notice when none comes back.

        Also while this rank makes no call: it may wait for bytes of another rank.
        """
        pause_s = self._lost_after_s / 4
        now_s = listening_s = time.monotonic()
        while not self._closed and self._broken is None:
            try:
                self._send({"type": "beat"})
            except (RankError, UsageError):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._broken is not None, pause_s)
                before_s, now_s = now_s, time.monotonic()
                if now_s - before_s > self._lost_after_s / 2:  # this process was suspended itself
                    listening_s = now_s
                silent_s = now_s - max(self._heard_s, listening_s)
                if silent_s > self._lost_after_s and not self._closed and self._broken is None:
                    self._break_hub(f"is silent for {silent_s:.0f} s")

    def _break_hub(self, what: str) -> None:
        self._broken = RankError(
            f"rank 0 (host {self._hub_host}) {what}; "
            f"rank {self._rank} was in phase {self._phase!r}",
            ranks=[0],
        )
        self._changed.notify_all()


def _greet(connection: socket.socket, rank: int, token: str, host: str, timeout_s: float) -> str:
    """Prove to the hub that this is a rank of its job, and check the hub. Returns its host.

    Raises ConnectionError for another job, and OSError.
    """
    connection.settimeout(timeout_s)
    asked = unpack(_read(connection, hello=True))
    nonce = secrets.token_hex(16)
    own: dict[str, Any] = {"rank": rank, "host": host, "nonce": nonce}
    own["proof"] = proof(token, str(asked.get("nonce")), f"rank {rank}")
    connection.sendall(pack(own))
    answer = unpack(_read(connection, hello=True))
    if answer.get("type") == "refused":
        raise RankError(f"rank {rank} (host {host}): {answer.get('reason')}", ranks=[rank])
    if not hmac.compare_digest(str(answer.get("proof")), proof(token, nonce, "hub")):
        raise ConnectionError("another job answers here")
    return str(answer.get("host"))


def _read(connection: socket.socket, *, hello: bool = False) -> bytes:
    return _exactly(connection, length_of(_exactly(connection, PREFIX.size), hello=hello))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connection in a forked child, which may live longer than this rank: the hub would
    not notice the end of the rank."""
    for member in list(_members):
        member._connection.close()


os.register_at_fork(after_in_child=_close_in_child)
