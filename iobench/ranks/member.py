"""Member: the connection of one rank to the hub."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from iobench.errors import RankError, UsageError
from iobench.ranks import calls
from iobench.ranks.wire import Wire, introduce, sendable

__all__ = ["Member"]

_GREETING_S = 30.0

K = TypeVar("K")
T = TypeVar("T")


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
        self._answers: dict[calls.Key, tuple[calls.CallAnswer, bytearray]] = {}
        self._pongs: dict[int, tuple[float, float]] = {}
        self._broken: RankError | None = None
        self._closed = False
        self._heard_s = time.monotonic()
        self._phase = "connect"
        hub = introduce(self._wire, token.encode(), calls.PURPOSE, rank=rank, host=host)
        self._hub_host = hub.host
        self._wire.limit(None, send_s=lost_after_s)
        for name, work in (("receive", self._receive), ("alive", self._beat)):
            threading.Thread(target=work, name=f"iobench-{name}", daemon=True).start()

    def begin(
        self, call: calls.Call, value: bytes
    ) -> Callable[[], tuple[calls.CallAnswer, bytearray]]:
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
        self._send(calls.Ping(number))
        return sent_s, *self._wait(self._pongs, number)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost."""
        return self._broken is not None

    def fail(self, error: str, exit_code: int = RankError.exit_code) -> None:
        """Tell the other ranks that this one cannot go on."""
        with contextlib.suppress(RankError):
            self._send(calls.Fail(sendable(error), exit_code))

    def close(self) -> None:
        """Say that this rank needs the others no more, and close the connection."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(RankError):
                self._send(calls.Close())
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

    def _send(self, message: calls.FromRank, value: bytes = b"") -> None:
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
                message, length = self._wire.receive(calls.FromHub)
                values = self._wire.take(length)
                self._heard_s = time.monotonic()
                if isinstance(message, calls.CallAnswer) and message.acknowledge and self._rank:
                    with contextlib.suppress(RankError, UsageError):
                        self._send(calls.Acknowledge(message.key))
                # After that: this process may end as soon as a call returns.
                self._take(message, values)
        except OSError:
            with self._changed:
                if not self._closed and self._broken is None:
                    self._break_hub("ended")
                self._changed.notify_all()
            self._wire.end()

    def _take(self, message: calls.FromHub, values: bytearray) -> None:
        with self._changed:
            match message:
                case calls.CallAnswer():
                    self._answers[message.key] = message, values
                case calls.Pong():
                    self._pongs[message.number] = message.at_s, self._heard_s
                case calls.Broken() if self._broken is None:
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
                self._send(calls.Beat())
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
