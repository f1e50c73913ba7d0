"""Agent: the process that keeps a node's segments. It outlives the trainer.

    python -m iobench.replicas.agent   (started by the local rank 0, see runtime.py)

It has a unix socket for the ranks of its node and a TCP port on one interface for other nodes.
It ends on `iobench agent stop`, when all ranks of the node have finished, when no rank was
connected for `keep_s` seconds, and when its directory was removed. Its memory ends with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from iobench import linux
from iobench.errors import IobenchError, ReplicaError
from iobench.ranks.wire import Hello, Listener, Message, Refusal, Welcome, Wire, sendable
from iobench.replicas import protocol
from iobench.replicas.protocol import (
    PURPOSE,
    Address,
    AgentDone,
    Facts,
    MissingPieces,
    ProbeRate,
    Push,
    Pushed,
    PutPiece,
    PutSegment,
    Sent,
    connect,
)
from iobench.replicas.runtime import AgentDirectory, AgentRecord, AgentSettings, start_of
from iobench.replicas.segment import (
    PIECE,
    Holdings,
    MemorySegment,
    NodeMemory,
    RankBytes,
    count_of,
    runs_of,
    span_of,
)
from iobench.text import parse_json
from iobench.units import GIB, MIB
from iobench.writers.image import Bytes
from iobench.writers.rate_limit import RateLimit

__all__ = ["Agent", "Service", "measure", "push"]

_LONGEST = GIB  # of digests and headers


class Service:
    """Answers the requests of one connection until it ends.

    Requests that change the state of the node's own ranks come only through the unix socket.
    """

    def __init__(self, agent: Agent, wire: Wire, *, local: bool) -> None:
        self._agent, self._wire, self._local = agent, wire, local
        self._holdings = agent.holdings

    def run(self) -> None:
        """Answer requests until the other end closes the connection. Raises ReplicaError."""
        while (found := self._wire.receive_next(protocol.Request)) is not None:
            request, length = found
            if not (self._local or isinstance(request, protocol.FOR_ALL)):
                name = type(request).__name__.lower()
                self._wire.send(Refusal(f"{name!r} is for ranks of this node only"))
                return
            try:
                answer = self._answer(request, length)
            except ReplicaError as error:
                answer = Refusal(sendable(str(error)))
            if answer is not None:
                self._wire.send(answer)

    def _answer(self, request: protocol.Request, length: int) -> Message | None:
        """Carry out a request. Return the answer; None if it was sent."""
        if isinstance(request, protocol.ProbeRate):
            return self._probe(length)
        payload = bytes(self._wire.take(length, _LONGEST))
        match request:
            case protocol.Start():
                return self._start(request)
            case protocol.Begin():
                self._begin(request)
                return None
            case protocol.Filled():
                segment = self._segment(request)
                segment.fill(request.version, _part(request, payload))
            case protocol.PutSegment():
                self._put(request, _part(request, payload))
                return None
            case protocol.Push():
                # The connection of the trainer may end meanwhile: the transfer is finished.
                return push(
                    self._holdings.find(request.rank, request.version),
                    request,
                    self._agent.token,
                    self._agent.limit,
                )
            case protocol.MeasureRate():
                return self._measure(request)
            case protocol.Describe():
                self._describe(request)
                return None
            case protocol.Get():
                self._get(request)
                return None
            case protocol.Open():
                self._open(request)
                return None
            case protocol.Inventory():
                return protocol.Segments(self._holdings.inventory())
            case protocol.Settle():
                self._holdings.settle(request.version, kept=request.kept)
            case protocol.Resume():
                self._holdings.resume(request.version)
            case protocol.Forget():
                self._holdings.forget(request.step)
            case protocol.AgentStatus():
                return self._agent.status()
            case protocol.Finish() | protocol.Stop():
                self._end(request)
                return None
        return protocol.AgentDone()

    def _start(self, request: protocol.Start) -> Message:
        self._holdings.expect(request.keeps)
        self._agent.ranks = request.ranks
        self._agent.finished.clear()
        self._holdings.memory.budget_bytes = request.budget_bytes
        return protocol.AgentDone()

    def _begin(self, request: protocol.Begin) -> None:
        segment = self._segment(request)
        self._with_room(request.rank, lambda: segment.reserve(request.version, request.size_bytes))
        self._wire.send(protocol.AgentDone())
        self._wire.send_fd(segment.fd)

    def _segment(
        self, request: protocol.Begin | protocol.Filled | protocol.PutSegment
    ) -> MemorySegment:
        return self._holdings.begin(request.rank, request.version, request.ranks)

    def _with_room(self, rank: int, take: Callable[[], None]) -> None:
        """Call `take`, which takes memory; again without segments of an earlier placement."""
        try:
            take()
        except ReplicaError:
            if not self._holdings.make_room(rank):
                raise
            take()

    def _measure(self, request: protocol.MeasureRate) -> Message:
        """Measure the rate to another agent and set the pace, a share of it."""
        rate = request.rate_bytes_per_s
        if rate is None:
            rate = request.share * measure(request.address, self._agent.token)
        self._agent.limit.rate_bytes_per_s = rate
        return protocol.Rate(rate)

    def _probe(self, length: int) -> Message:
        memory = np.empty(PIECE, np.uint8)
        while length:
            count = min(length, PIECE)
            self._wire.take_into(memory[:count])
            length -= count
        return protocol.AgentDone()

    def _put(self, request: protocol.PutSegment, part: RankBytes) -> None:
        """Receive the pieces of one rank, until the sender says that it has sent all."""
        rank, version = request.rank, request.version
        segment = self._segment(request)
        if not segment.complete:
            self._with_room(rank, lambda: segment.declare(version, part))
        missing = protocol.MissingPieces(runs_of(segment.missing(version)))
        self._wire.send(missing)
        memory = np.empty(PIECE, np.uint8)
        # At the end of the connection it stays incomplete.
        while (found := self._wire.receive_next(protocol.PutPart)) is not None:
            message, length = found
            if isinstance(message, protocol.PutPiece):
                self._piece(message.number, length, part, memory)
                segment.add(version, message.number, memory[:length])
                continue
            missing = protocol.MissingPieces(runs_of(segment.missing(version)))
            self._wire.send(missing)
            if not missing.pieces:
                return

    def _piece(self, number: int, length: int, part: RankBytes, memory: Bytes) -> None:
        if length > PIECE or number not in range(count_of(part.size_bytes)):
            raise ReplicaError(f"piece {number} of {length} bytes has no position here")
        self._wire.take_into(memory[:length])

    def _describe(self, request: protocol.Describe) -> None:
        segment = self._holdings.find(request.rank, request.version)
        part = segment.part
        if part is None:
            raise ReplicaError(f"rank {segment.rank} was replaced by another save")
        answer = protocol.Described(part.size_bytes, len(part.digests))
        self._wire.send(answer, part.digests, part.header)

    def _get(self, request: protocol.Get) -> None:
        """Send bytes of a complete segment. The receiver compares the digests."""
        start, stop = request.start, request.stop
        segment = self._holdings.find(request.rank, request.version)
        if not start <= stop <= segment.size_bytes:
            raise ReplicaError(f"[{start}, {stop}) of {segment.size_bytes} bytes")
        fd = os.dup(segment.fd)  # a save may replace the segment: then the digests differ
        try:
            self._wire.send_file(protocol.AgentDone(), fd, start, stop)
        finally:
            os.close(fd)

    def _open(self, request: protocol.Open) -> None:
        """Pass the memory of a complete segment, readable only."""
        segment = self._holdings.find(request.rank, request.version)
        fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._wire.send(protocol.AgentDone())
            self._wire.send_fd(fd)
        finally:
            os.close(fd)

    def _end(self, request: protocol.Finish | protocol.Stop) -> None:
        """End the agent, or count a rank that has ended well: after the last one it ends too."""
        self._wire.send(protocol.AgentDone())
        if isinstance(request, protocol.Finish):
            self._agent.finished.add(request.rank)
        if isinstance(request, protocol.Stop) or len(self._agent.finished) >= self._agent.ranks:
            self._agent.stop()


def _part(request: protocol.Filled | protocol.PutSegment, payload: bytes) -> RankBytes:
    cut = request.digests
    return RankBytes(request.size_bytes, payload[:cut], payload[cut:])


_TIMEOUT_S = 60.0
_SENDS = 3
_PROBE = 4 * MIB
_PROBE_S = 0.2
_AHEAD = 4  # so that the link is busy while an answer is on its way


def push(segment: MemorySegment, request: Push, token: bytes, limit: RateLimit) -> Pushed:
    """Send the bytes of `segment` to another agent. On return they are complete there.

    A piece that arrives damaged is sent again, twice at most. Raises ReplicaError.
    """
    part, version = segment.part, request.version
    if part is None:
        raise ReplicaError(f"step {version.step} was replaced before it was sent")
    sent = damaged = 0
    with connect(request.address, token, timeout_s=_TIMEOUT_S) as other:
        put = PutSegment(version, segment.rank, segment.ranks, part.size_bytes, len(part.digests))
        answer = other.ask(MissingPieces, put, part.digests, part.header)
        for attempt in range(_SENDS):
            missing = [n for begin, end in answer.pieces for n in range(begin, end)]
            damaged += len(missing) if attempt else 0
            for number in missing:
                start, stop = span_of(number, part.size_bytes)
                other.send_file(
                    PutPiece(number), segment.fd, start, stop, limit.wait, limit.unit_bytes
                )
                if segment.version != version:
                    raise ReplicaError(f"step {version.step} was replaced while it was sent")
                sent += stop - start
            other.send(Sent())
            answer, _ = other.receive(MissingPieces)
            if not answer.pieces:
                return Pushed(sent, damaged)
    raise ReplicaError(
        f"{other.other}: pieces of step {version.step} arrived damaged {_SENDS} times"
    )


def measure(address: Address, token: bytes) -> float:
    """Return the rate to the agent at `address`, in bytes per second, measured in 0.2 s or more.

    The first 4 MiB warm the connection up and do not count.
    """
    payload = np.random.default_rng().integers(0, 256, _PROBE, np.uint8)
    with connect(address, token, timeout_s=_TIMEOUT_S) as other:
        other.ask(AgentDone, ProbeRate(), payload)
        began_s, sent, answered = time.monotonic(), 0, 0
        while time.monotonic() - began_s < _PROBE_S or not sent:
            other.send(ProbeRate(), payload)
            sent += 1
            if sent - answered > _AHEAD:
                other.receive(AgentDone)
                answered += 1
        for _ in range(sent - answered):
            other.receive(AgentDone)
        elapsed_s = time.monotonic() - began_s
    return sent * _PROBE / elapsed_s


_NICE = 10
_HANDSHAKE_S = 10.0
_LOOK_S = 1.0
_TRIES, _TRY_S = 5, 0.11
_OPEN_FILES = 65536
_STRANGERS = 1024
_FIRST_OOM = "500"
"""When the node runs out of memory, the kernel kills the replicas before the training."""


class Agent:
    """One agent. `serve` returns when it has ended; its memory is free then."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._directory = AgentDirectory(Path(settings.directory))
        token = self._directory.token()
        if token is None:
            raise ReplicaError(f"{settings.directory}: there is no token")
        self.token = token
        self.limit = RateLimit(None)
        self.holdings = Holdings(NodeMemory())
        self.ranks = 1
        """Ranks of this node; when so many have finished, the agent ends."""
        self.finished: set[int] = set()
        self._ended = threading.Event()
        self._began_s = self._left_s = time.monotonic()
        self._trainers = 0
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Open both sockets. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._directory.socket.unlink()
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(str(self._directory.socket))
        self._remote = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._remote.bind((self._settings.host, 0))
        for server in (self._local, self._remote):
            server.listen(128)

    def serve(self) -> None:
        """Serve connections until the end. Then the process must end: some are open still."""
        self._record()
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        Listener(
            [self._local, self._remote],
            token=self.token,
            purpose=PURPOSE,
            admit=self._serve,
            most=min(open_files // 4, _STRANGERS),
            greeting_s=_HANDSHAKE_S,
            log=_log,
        )
        while not self._ended.wait(_LOOK_S) and not self._over():
            pass
        if self._directory.names(os.getpid()):
            self._directory.remove()
        self.holdings.free()

    def stop(self) -> None:
        """Let `serve` return."""
        self._ended.set()

    def status(self) -> Facts:
        """Return facts about the agent and its segments."""
        with self._lock:
            trainers = self._trainers
        return Facts(
            pid=os.getpid(),
            job=self._settings.job,
            location=self._settings.location,
            address=self._address,
            age_s=time.monotonic() - self._began_s,
            trainers=trainers,
            taken_bytes=self.holdings.memory.taken_bytes,
            rate_bytes_per_s=self.limit.rate_bytes_per_s,
            segments=self.holdings.inventory(),
        )

    @property
    def _address(self) -> Address:
        host, port = self._remote.getsockname()[:2]
        return host, port

    def _record(self) -> None:
        started = start_of(os.getpid())
        assert started is not None
        self._directory.set_record(
            AgentRecord(
                pid=os.getpid(),
                started=started,
                job=self._settings.job,
                location=self._settings.location,
                address=self._address,
            )
        )

    def _over(self) -> bool:
        """Whether nothing will need this agent any more."""
        if not self._directory.names(os.getpid()):
            return True  # the directory was removed, or belongs to another agent
        with self._lock:
            alone_s = 0.0 if self._trainers else time.monotonic() - self._left_s
        return alone_s > self._settings.keep_s

    def _serve(self, wire: Wire, _: Hello, welcome: Welcome) -> None:
        local = wire.local
        wire.failure = ReplicaError
        if local:
            with self._lock:  # before the answer: a rank that is connected is counted
                self._trainers += 1
        try:
            wire.send(welcome)
            Service(self, wire, local=local).run()
        finally:
            wire.close()
            if local:
                with self._lock:
                    self._trainers -= 1
                    self._left_s = time.monotonic()


def _allow_open_files() -> None:
    """Raise the limit of open files as far as it goes without privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, _OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%FT%T')} {text}\n")
    sys.stderr.flush()


def _yield_session() -> None:
    """Lower the CPU priority of this session to that of its threads.

    Between sessions the kernel divides the CPU without regard to the nice values of their threads
    (sched(7), autogroup), and the trainer is in another session. The file is missing in kernels
    without this feature; within a control group for the CPU it has no effect.
    """
    for _ in range(_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(_NICE))
        except BlockingIOError:  # without privilege, once in 100 ms on the whole machine
            time.sleep(_TRY_S)
        except OSError:
            return
        else:
            return


def main() -> NoReturn:
    """Start an agent with the settings on stdin. The caller returns when it listens."""
    settings = AgentSettings(**parse_json(sys.stdin.buffer.read()))
    _allow_open_files()
    try:
        agent = Agent(settings)
        agent.listen()
    except (OSError, IobenchError) as error:
        sys.exit(f"the memory agent cannot start: {error}")
    if os.fork():  # the parent ends: the agent is no child of the trainer, and its end no zombie
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    with open("/dev/null", "rb") as null, open(agent._directory.log, "ab") as log:
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir("/")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_OOM)
    with contextlib.suppress(OSError):
        linux.yield_to_others(_NICE)
    _yield_session()
    agent.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
