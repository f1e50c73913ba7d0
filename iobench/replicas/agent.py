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
from pathlib import Path
from typing import NoReturn

from iobench import linux
from iobench.errors import IobenchError, ReplicaError
from iobench.ranks.listener import Listener
from iobench.ranks.wire import Hello, Welcome, Wire
from iobench.replicas.holdings import Holdings
from iobench.replicas.protocol import PURPOSE, Address, Facts
from iobench.replicas.push import TokenBucket
from iobench.replicas.runtime import AgentDirectory, AgentRecord, AgentSettings, start_of
from iobench.replicas.segment import NodeMemory
from iobench.replicas.service import Service
from iobench.text import parse_json

__all__ = ["Agent"]

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
        self.bucket = TokenBucket(None)
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
            rate_bytes_per_s=self.bucket.rate_bytes_per_s,
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
