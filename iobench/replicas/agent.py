"""Agent: the process that keeps a node's segments. It outlives the trainer.

    python -m iobench.replicas.agent   (started by the local rank 0, see start.py)

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from iobench import linux
from iobench.errors import IobenchError, ReplicaError
from iobench.ranks.newcomers import Newcomers
from iobench.replicas.bucket import TokenBucket
from iobench.replicas.endpoint import Address
from iobench.replicas.frames import Wire
from iobench.replicas.handshake import accept
from iobench.replicas.holdings import Holdings
from iobench.replicas.runtime import AgentDirectory, AgentRecord, start_of
from iobench.replicas.segment import NodeMemory
from iobench.replicas.service import Service
from iobench.text import parse_json

__all__ = ["Agent", "AgentSettings"]

_NICE = 10
_HANDSHAKE_S = 10.0
_LOOK_S, _PAUSE_S = 1.0, 0.1
_TRIES, _TRY_S = 5, 0.11
_OPEN_FILES = 65536
_STRANGERS = 1024
_FIRST_OOM = "500"
"""When the node runs out of memory, the kernel kills the replicas before the training."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """`host` is the address of the interface to listen on."""

    directory: str
    host: str
    job: str
    location: str
    keep_s: float


class Agent:
    """One agent. `serve` returns when it has ended; its memory is free then."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._directory = AgentDirectory(Path(settings.directory))
        token = self._directory.token()
        if token is None:
            raise ReplicaError(f"{settings.directory}: there is no token")
        self.token = token
        self.bucket = TokenBucket(None)
        self.holdings = Holdings(NodeMemory())
        self.ranks = 1
        """Ranks of this node; when so many have finished, the agent ends."""
        self.finished: set[int] = set()
        self._ended = threading.Event()
        self._began_s = self._left_s = time.monotonic()
        self._trainers = 0
        self._wires: set[Wire] = set()
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._newcomers = Newcomers(min(open_files // 4, _STRANGERS), _HANDSHAKE_S)
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Open both sockets. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._directory.socket.unlink()
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(str(self._directory.socket))
        self._remote = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._remote.bind((self._settings.host, 0))
        for listener in (self._local, self._remote):
            listener.listen(128)

    def serve(self) -> None:
        """Serve connections until the end."""
        self._record()
        for listener, local in ((self._local, True), (self._remote, False)):
            threading.Thread(target=self._accept, args=(listener, local), daemon=True).start()
        while not self._ended.wait(_LOOK_S) and not self._over():
            self._newcomers.end_late()
        self.stop()
        if self._directory.names(os.getpid()):
            self._directory.remove()
        with self._lock:
            for wire in self._wires:
                wire.close()
        self.holdings.free()

    def stop(self) -> None:
        """Let `serve` return."""
        self._ended.set()

    def status(self) -> dict[str, Any]:
        """Return facts about the agent and its segments."""
        with self._lock:
            trainers = self._trainers
        return {
            "pid": os.getpid(),
            "job": self._settings.job,
            "location": self._settings.location,
            "address": self._address,
            "age_s": time.monotonic() - self._began_s,
            "trainers": trainers,
            "taken_bytes": self.holdings.memory.taken_bytes,
            "rate_bytes_per_s": self.bucket.rate_bytes_per_s,
            "segments": self.holdings.inventory(),
        }

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

    def _accept(self, listener: socket.socket, local: bool) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._ended.is_set():
                    return
                self._newcomers.end_oldest()  # out of descriptors: one becomes free
                time.sleep(_PAUSE_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection, local), daemon=True).start()
            except RuntimeError:  # no more threads
                connection.close()
                self._newcomers.end_oldest()
                time.sleep(_PAUSE_S)

    def _serve(self, connection: socket.socket, local: bool) -> None:
        other = "a rank of this node" if local else f"the peer {_host_of(connection)}"
        wire = Wire(connection, other, _HANDSHAKE_S)
        with self._lock:
            self._wires.add(wire)
        self._newcomers.add(wire, wire.end)
        try:
            answer = accept(wire, self.token)
            self._newcomers.remove(wire)
            with self._counted(local):  # before the answer: a rank that is connected is counted
                answer()
                wire.limit(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                Service(self, wire, local=local).run()
        except (ReplicaError, OSError) as error:
            _log(str(error))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _log(f"{other} sent a request that is not one: {error!r:.200}")
        finally:
            self._newcomers.remove(wire)
            with self._lock:
                self._wires.discard(wire)
            wire.close()

    @contextlib.contextmanager
    def _counted(self, local: bool) -> Any:
        if not local:
            yield
            return
        with self._lock:
            self._trainers += 1
        try:
            yield
        finally:
            with self._lock:
                self._trainers -= 1
                self._left_s = time.monotonic()


def _host_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has ended already
        return "that has left"


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
