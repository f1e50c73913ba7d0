"""Member: the end of a rank of its connection to the hub; and the messages between both.

The values of the ranks are JSON in the bytes after a message. So the hub passes them on without a
look into them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from iobench.errors import RankError, UsageError
from iobench.ranks.wire import Message, Wire, introduce, sendable

PURPOSE = "calls"
"""What rank 0 listens for; a part of the proof."""

EVERY_RANK = "construct the Checkpointer in every rank, or pass world='alone'"
"""What to do about ranks that never connect."""

BEAT = -1
"""The number of pings whose answer only says that rank 0 lives."""

_GREETING_S = 30.0

K = TypeVar("K")
T = TypeVar("T")

CallKind = Literal["all-gather", "gather", "broadcast", "scatter"]

Key = tuple[str, int]
"""A call: the name of its `sub` and its number there."""


class FromRank(Message):
    """What a rank sends to the hub."""


class FromHub(Message):
    """What the hub sends to a rank."""


class Call(FromRank):
    """This rank makes a call; its value follows."""

    key: Key
    kind: CallKind
    phase: str
    deadline_s: float
    aside: bool = False
    error: str | None = None
    acknowledged: bool = True


class Acknowledge(FromRank):
    """This rank has the answer to a call."""

    key: Key


class Ping(FromRank):
    """A sign of life, and a question for the time of rank 0."""

    number: int


class Close(FromRank):
    """This rank needs the others no more."""


class Fail(FromRank):
    """This rank cannot go on."""

    error: str
    exit_code: int


class CallAnswer(FromHub):
    """The answer to a call: `errors` as (rank, host, text), or the values, which follow.

    They are the same value so many `times`. With `acknowledge` the hub waits for an Acknowledge.
    """

    key: Key
    acknowledge: bool
    times: int = 1
    errors: list[tuple[int, str, str]] = []  # noqa: RUF012 -- msgspec copies an empty default


class Pong(FromHub):
    """The answer to a Ping."""

    number: int
    at_s: float


class Broken(FromHub):
    """The job cannot go on."""

    ranks: list[int]
    message: str
    exit_code: int = RankError.exit_code


def json_bytes(value: Any) -> bytes:
    """Return `value` as JSON in one line. Raises TypeError for more than JSON.

    Not by msgspec: it refuses names of files that are not UTF-8, and makes None of infinity.
    """
    return json.dumps(value, separators=(",", ":")).encode()


class Member:
    """Sends the calls of this rank, and hands the hub's answers to the threads that wait for them.

    A thread receives; another sends a sign of life. `RankError` is raised by every call after a
    rank was lost, and names it. The constructor raises ConnectionError for another job.
    """

    def __init__(
        self, connection: socket.socket, *, rank: int, token: str, host: str, lost_after_s: float
    ) -> None:
        self._wire = Wire(connection, "rank 0", min(_GREETING_S, lost_after_s))
        self._rank, self._lost_after_s = rank, lost_after_s
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[Key, tuple[CallAnswer, bytearray]] = {}
        self._pongs: dict[int, tuple[float, float]] = {}
        self._broken: RankError | None = None
        self._closed = False
        self._heard_s = time.monotonic()
        self._phase = "connect"
        hub = introduce(self._wire, token.encode(), PURPOSE, rank=rank, host=host)
        self._hub_host = hub.host
        self._wire.limit(None, send_s=lost_after_s)
        for name, work in (("receive", self._receive), ("alive", self._beat)):
            threading.Thread(target=work, name=f"iobench-{name}", daemon=True).start()

    def begin(self, call: Call, value: bytes) -> Callable[[], tuple[CallAnswer, bytearray]]:
        """Send a call with the JSON of what this rank gives. Raises RankError.

        Return a function that waits for the hub's answer and returns it with the JSON of what the
        ranks gave.
        """
        self.check()
        if not call.aside:
            self._phase = call.phase
        self._send(call, value)
        return partial(self._wait, self._answers, call.key)

    def _wait(self, answers: dict[K, T], key: K) -> T:
        """Wait for the hub, which keeps the deadlines; `_beat` notices when it is silent."""
        with self._changed:
            while key not in answers:
                self.check()
                self._changed.wait()
            return answers.pop(key)

    def ping(self, number: int) -> tuple[float, float, float]:
        """Return the monotonic times before, at the hub and after. Raises RankError."""
        self.check()
        sent_s = time.monotonic()
        self._send(Ping(number))
        return sent_s, *self._wait(self._pongs, number)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost."""
        return self._broken is not None

    def fail(self, error: str, exit_code: int = RankError.exit_code) -> None:
        """Tell the other ranks that this one cannot go on."""
        with contextlib.suppress(RankError):
            self._send(Fail(sendable(error), exit_code))

    def close(self) -> None:
        """Say that this rank needs the others no more, and close the connection."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(RankError):
                self._send(Close())
            self._wire.end()
        self._wire.close()

    def check(self) -> None:
        """Raise RankError if a rank was lost, and UsageError after `close`."""
        if os.getpid() != self._pid:
            raise UsageError("the connection to the other ranks does not work in a forked child")
        if self._broken:
            broken = self._broken
            raise RankError(*broken.args, ranks=broken.ranks, exit_code=broken.exit_code)
        if self._closed:
            raise UsageError("the connection to the other ranks is closed")

    def _send(self, message: FromRank, value: bytes = b"") -> None:
        try:
            with self._sending:
                self._wire.send(message, value)
        except OSError as error:
            with self._changed:
                if self._broken is None:
                    self._break_hub(f"cannot be reached: {error}")
                self.check()

    def _receive(self) -> None:
        try:
            while True:
                message, length = self._wire.receive(FromHub)
                values = self._wire.take(length)
                self._heard_s = time.monotonic()
                if isinstance(message, CallAnswer) and message.acknowledge and self._rank:
                    with contextlib.suppress(RankError, UsageError):
                        self._send(Acknowledge(message.key))
                # After that: this process may end as soon as a call returns.
                self._take(message, values)
        except OSError:
            with self._changed:
                if not self._closed and self._broken is None:
                    self._break_hub("ended")
                self._changed.notify_all()
            self._wire.end()

    def _take(self, message: FromHub, values: bytearray) -> None:
        with self._changed:
            match message:
                case CallAnswer():
                    self._answers[message.key] = message, values
                case Pong():
                    self._pongs[message.number] = message.at_s, self._heard_s
                case Broken() if self._broken is None:
                    self._broken = RankError(
                        message.message, ranks=message.ranks, exit_code=message.exit_code
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
                self._send(Ping(BEAT))
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
