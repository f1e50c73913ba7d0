"""Hub: the thread of rank 0 to which all ranks are connected; it gathers and answers.

A rank that ends in any way closes its connection, so the hub knows it at once. A rank that is
stopped or cut off is known by its silence. Either way all ranks are told which one is lost.

The process of rank 0 may end as soon as a call returns there, and the hub with it. So rank 0 gets
its answer last, when all other ranks have acknowledged theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from iobench.errors import RankError
from iobench.ranks import calls
from iobench.ranks.wire import HEAD, Hello, Listener, Message, Welcome, Wire, decoded, lengths, pack
from iobench.writers.blocks import interpreter_end

_GREETING_S = 5.0
_STRANGERS = 64  # connections of others than ranks
_LOOK_S = 0.02
_SUSPENDED_S = 15.0  # without work: this process was suspended
_ACKNOWLEDGE_S = 30.0
"""How long rank 0 waits until the others have acknowledged their answers."""


@dataclass(kw_only=True)
class _Peer:
    """A connected rank, and what it did last."""

    host: str
    writer: asyncio.StreamWriter
    phase: str = "started"
    phase_since_s: float = field(default_factory=time.monotonic)
    seen_s: float = field(default_factory=time.monotonic)
    closed: bool = False
    """Whether it said that it needs the other ranks no more."""


@dataclass(kw_only=True)
class _Round:
    """One call of all ranks, as the `first` one made it: what they sent so far."""

    first: calls.Call
    until_s: float
    sent: dict[int, tuple[calls.Call, bytes]] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Owed:
    """What rank 0 gets after these ranks have acknowledged their answers to the call `key`."""

    key: calls.Key | None = None
    ranks: set[int] = field(default_factory=set)
    answer: bytes
    until_s: float = 0.0


class Hub:
    """Answers `size` ranks on the listening `server`, in a thread, until `close`.

    A rank is lost when its connection breaks or when nothing came from it for `lost_after_s`.
    """

    def __init__(
        self, server: socket.socket, *, size: int, token: str, host: str, lost_after_s: float
    ) -> None:
        self._size, self._lost_after_s = size, lost_after_s
        self._peers: dict[int, _Peer] = {}
        self._rounds: dict[calls.Key, _Round] = {}
        self._owed: list[_Owed] = []
        self._broken: calls.Broken | None = None
        self._abandoned = self._said_all = False
        self._serving: dict[asyncio.Task[object], asyncio.StreamWriter] = {}
        self._looked_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._listener = Listener(
            server,
            token=token.encode(),
            purpose=calls.PURPOSE,
            admit=self._admit,
            most=size + _STRANGERS,
            greeting_s=_GREETING_S,
            host=host,
        )
        self._thread = threading.Thread(target=self._run, name="iobench-hub", daemon=True)
        self._thread.start()
        interpreter_end.at_end(self, Hub._at_end)

    def close(self) -> None:
        """End the thread once every rank has closed its connection, or after `lost_after_s`."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(self._lost_after_s)

    def abandon(self, why: str) -> None:
        """Tell all ranks `why` rank 0 cannot go on, and end the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._break, [0], why)
        self.close()

    def _at_end(self) -> None:
        """The interpreter of rank 0 ends: tell the ranks that may still need it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._left, 0)
        self.close()
        # A thread that still runs when the interpreter clears its modules leaves tasks, which
        # asyncio reports on stderr ("Task was destroyed but it is pending").
        self._abandoned = True
        self._thread.join(2 * _GREETING_S)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost."""
        return self._broken is not None

    def missing(self, timeout_s: float, *, broken: bool = False) -> list[int]:
        """Wait until all other ranks have connected. Return those that have not after `timeout_s`.

        The wait ends when the job is broken. With `broken` it goes on: ranks that come late are
        told why then.
        """
        until_s = time.monotonic() + timeout_s
        while (left := self._absent()) and time.monotonic() < until_s:
            if self._broken and not broken:
                break
            time.sleep(_LOOK_S)
        return left

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._peers]

    def still_here(self) -> list[int]:
        """Return the other ranks that are connected and not lost. Any thread may call it."""
        gone = {0, *self._lost()}
        peers = {rank: one for rank, one in dict(self._peers).items() if rank not in gone}
        return [r for r, one in peers.items() if not (one.closed or one.writer.is_closing())]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        pause_s = min(1.0, self._lost_after_s / 4)
        while not (self._ended.is_set() and (self._abandoned or self._all_left())):
            if self._ended.is_set():
                await asyncio.sleep(0.01)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), pause_s)
            self._look()
        self._listener.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        """Let each rank read what was sent before its connection ends.

        A connection that is closed while unread bytes wait is reset, and what was sent is lost. So
        only one direction ends, until the rank has ended the other one.
        """
        self._said_all = True  # a rank may still send a sign of life, which has no answer now
        for peer in self._peers.values():
            with contextlib.suppress(OSError, RuntimeError):
                peer.writer.write_eof()
        lost = {self._peers[rank].writer for rank in self._lost() if rank in self._peers}
        if waited := [task for task, writer in self._serving.items() if writer not in lost]:
            await asyncio.wait(waited, timeout=min(_GREETING_S, self._lost_after_s))
        for writer in self._serving.values():
            writer.transport.abort()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:  # of ranks that are stopped or cut off
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _lost(self) -> list[int]:
        """The ranks for which the job is broken. They may be stopped: no answer is awaited."""
        return self._broken.ranks if self._broken else []

    def _all_left(self) -> bool:
        if self._owed:
            return False
        return self._broken is not None or all(peer.closed for peer in self._peers.values())

    def _admit(self, wire: Wire, hello: Hello, welcome: Welcome) -> None:
        """Take a rank that has proven itself. A thread of the listener calls it."""
        coming = self._connected(wire.detach(), hello, welcome)
        try:
            asyncio.run_coroutine_threadsafe(coming, self._loop)
        except RuntimeError:  # the loop has ended
            coming.close()
            raise

    async def _connected(self, connection: socket.socket, hello: Hello, welcome: Welcome) -> None:
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        task, rank = asyncio.current_task(), hello.rank
        assert task is not None
        self._serving[task] = writer
        try:
            writer.write(pack(welcome))
            if not 0 <= rank < self._size or rank in self._peers:
                writer.write(pack(calls.Broken([rank], f"rank {rank} is connected already")))
                writer.write_eof()
                await reader.read()  # a close with unread bytes would lose what was sent
                return
            self._peers[rank] = _Peer(host=hello.host, writer=writer)
            if self._broken:
                self._send(rank, self._broken)
            while True:
                text, payload = lengths(await reader.readexactly(HEAD.size))
                message = decoded(await reader.readexactly(text), calls.FromRank)
                self._receive(rank, message, await reader.readexactly(payload))
        except (OSError, EOFError, LookupError):
            self._left(rank)
        finally:
            del self._serving[task]
            writer.close()

    def _receive(self, rank: int, message: Message, value: bytes) -> None:
        peer = self._peers[rank]
        peer.seen_s = now_s = time.monotonic()
        match message:
            case calls.Ping():
                self._send(rank, calls.Pong(message.number, now_s))
            case calls.Acknowledge():
                self._acknowledge(rank, message.key)
            case calls.Close():
                peer.closed = True
                self._acknowledge(rank)
                for call in self._rounds.values():
                    self._check_present(call)
            case calls.Fail():
                reason = f"{self._names([rank])} failed: {message.error}"
                self._break([rank], reason, message.exit_code)
            case calls.Call():
                if not message.aside:
                    peer.phase, peer.phase_since_s = message.phase, now_s
                self._put(rank, message, value, now_s)

    def _put(self, rank: int, message: calls.Call, value: bytes, now_s: float) -> None:
        new = _Round(first=message, until_s=now_s + message.deadline_s)
        call = self._rounds.setdefault(message.key, new)
        first = call.first
        if (first.phase, first.kind) != (message.phase, message.kind):
            self._break(
                [rank],
                f"rank {rank} (host {self._peers[rank].host}) is in phase {message.phase!r} "
                f"({message.kind}), others are in {first.phase!r} ({first.kind}); all ranks "
                "must make the same calls in the same order",
            )
            return
        call.sent[rank] = message, value
        if len(call.sent) == self._size:
            del self._rounds[message.key]
            self._answer(message.key, call)
        else:
            self._check_present(call)

    def _check_present(self, call: _Round) -> None:
        """Break the job for a call that waits for ranks that have closed their connection."""
        gone = [
            one for one in self._missing(call) if one in self._peers and self._peers[one].closed
        ]
        if gone:
            self._break(gone, f"{self._names(gone)} closed before phase {call.first.phase!r}")

    def _answer(self, key: calls.Key, call: _Round) -> None:
        """Send every rank what it asked for: the values, or the errors of the ranks that failed."""
        waits = call.sent[0][0].acknowledged
        errors = [
            (rank, self._peers[rank].host, sent.error)
            for rank, (sent, _) in sorted(call.sent.items())
            if sent.error is not None
        ]
        if errors:
            packed = [pack(calls.CallAnswer(key, waits, errors=errors))] * self._size
        else:
            packed = _packed(call, key, waits)
        for rank in range(1, self._size):
            self._write(rank, packed[rank])
        if not waits:
            self._write(0, packed[0])
            return
        there = {rank for rank, peer in self._peers.items() if rank and not peer.closed}
        until_s = time.monotonic() + _ACKNOWLEDGE_S
        there -= {*self._lost()}
        self._owed.append(_Owed(key=key, ranks=there, answer=packed[0], until_s=until_s))
        self._settle()

    def _acknowledge(self, rank: int, key: calls.Key | None = None) -> None:
        """Note that `rank` has its answer to the call `key`, or needs none any more."""
        for one in self._owed:
            if key in (None, one.key):
                one.ranks.discard(rank)
        self._settle()

    def _settle(self) -> None:
        """Answer rank 0 where all others have their answers, or had time enough."""
        now_s = time.monotonic()
        while self._owed and (not self._owed[0].ranks or now_s > self._owed[0].until_s):
            self._write(0, self._owed.pop(0).answer)

    def _look(self) -> None:
        """Break the job for a silent rank, and for a call whose deadline has passed."""
        self._settle()
        now_s = time.monotonic()
        self._forgive(now_s - self._looked_s)
        self._looked_s = now_s
        for rank, peer in self._peers.items():
            if peer.closed or now_s - peer.seen_s <= self._lost_after_s:
                continue
            self._break([rank], f"{self._names([rank])} is silent for {now_s - peer.seen_s:.0f} s")
            # Where rank 0 is cut off, all others are silent: the first one is the reason that is
            # reported, and no acknowledgement of any of them is awaited.
            self._acknowledge(rank)
        if self._broken:
            return
        for call in self._rounds.values():
            if now_s > call.until_s:
                missing = self._missing(call)
                never = any(rank not in self._peers for rank in missing)
                self._break(
                    missing,
                    f"{self._names(missing)} did not reach phase {call.first.phase!r} within "
                    f"{round(call.first.deadline_s, 1):g} s"
                    + (f"; {calls.EVERY_RANK}" if never else ""),
                )
                return

    def _forgive(self, paused_s: float) -> None:
        """Give all ranks more time if this process did nothing itself for `paused_s`.

        Whoever suspends a job (SIGSTOP of all ranks, a virtual machine that is moved) resumes it
        later. What the ranks sent meanwhile is not read yet.
        """
        if paused_s > min(_SUSPENDED_S, self._lost_after_s / 2):
            for peer in self._peers.values():
                peer.seen_s += paused_s
            for call in self._rounds.values():
                call.until_s += paused_s
            for owed in self._owed:
                owed.until_s += paused_s

    def _missing(self, call: _Round) -> list[int]:
        return [rank for rank in range(self._size) if rank not in call.sent]

    def _names(self, ranks: list[int]) -> str:
        """Return `rank 3 (host b, in phase 'write' for 12 s)` for each."""
        named = []
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is None:
                named.append(f"rank {rank} (never connected)")
                continue
            for_s = time.monotonic() - peer.phase_since_s
            named.append(f"rank {rank} (host {peer.host}, {peer.phase!r} for {for_s:.0f} s)")
        return ", ".join(named)

    def _left(self, rank: int) -> None:
        self._acknowledge(rank)
        if rank in self._peers and not self._peers[rank].closed:
            self._break([rank], f"{self._names([rank])} ended")

    def _break(self, ranks: list[int], message: str, exit_code: int = RankError.exit_code) -> None:
        """Tell every rank that the job cannot go on. Only the first reason counts."""
        if self._broken:
            return
        self._broken = calls.Broken(ranks, message, exit_code)
        for rank in self._peers:
            if rank:
                self._send(rank, self._broken)
        if 0 in self._peers:
            self._owed.append(_Owed(answer=pack(self._broken)))
        for rank in ranks:
            self._acknowledge(rank)
        self._settle()

    def _send(self, rank: int, message: Message) -> None:
        self._write(rank, pack(message))

    def _write(self, rank: int, data: bytes) -> None:
        writer = self._peers[rank].writer
        if not (self._said_all or writer.is_closing()):
            writer.write(data)  # asyncio keeps what the rank does not take yet


def _packed(call: _Round, key: calls.Key, acknowledge: bool) -> list[bytes]:
    """Return the answer for each rank: with the values of all ranks, of rank 0, or none.

    An answer that is the same for all ranks is packed once, and equal values are sent once: to pack
    the values of 1,024 ranks for each of them would take a second in each save.
    """
    size = len(call.sent)
    values = [call.sent[rank][1] for rank in range(size)]

    def answer(value: bytes, times: int = 1) -> bytes:
        return pack(calls.CallAnswer(key, acknowledge, times=times), len(value)) + value

    match call.first.kind:
        case "scatter":
            return [answer(value) for value in values[0].split(b"\n")]
        case "broadcast":
            return [answer(values[0])] * size
        case "gather":
            return [answer(b",".join(values)), *[answer(b"")] * (size - 1)]
    if all(value == values[0] for value in values):
        return [answer(values[0], size)] * size
    return [answer(b",".join(values))] * size
