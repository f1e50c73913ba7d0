"""Starting and stopping of agents."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from iobench.errors import ReplicaError
from iobench.replicas.agent import AgentSettings
from iobench.replicas.endpoint import Endpoint
from iobench.replicas.runtime import AgentDirectory, AgentRecord, agent_directories

__all__ = ["start_agent", "stop_agent", "stop_earlier_agents"]

_START_S = 60.0
_STOP_S = 10.0
_LOCAL_S = 30.0


def start_agent(
    directory: AgentDirectory, token: bytes, *, host: str, job: str, location: str, keep_s: float
) -> AgentRecord:
    """Return the job's agent on this node; start it when it does not run with this token.

    An agent with another token is stopped, with its memory. Raises ReplicaError.
    """
    with _alone(directory):
        record = directory.record()
        if record is not None:
            if directory.token() == token and _listens(directory, token):
                return record
            _end(directory, record)
        directory.remove()
        directory.set_token(token)
        settings = AgentSettings(
            directory=str(directory.path), host=host, job=job, location=location, keep_s=keep_s
        )
        # A session of its own: signals to the trainer's process group do not reach it.
        done = subprocess.run(
            # -P: not the working directory's modules, which may be another user's.
            [sys.executable, "-P", "-m", "iobench.replicas.agent"],
            input=json.dumps(asdict(settings)).encode(),
            capture_output=True,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise ReplicaError(lines[-1])
        return _recorded(directory)


def _recorded(directory: AgentDirectory) -> AgentRecord:
    until_s = time.monotonic() + _LOCAL_S
    while time.monotonic() < until_s:
        if (record := directory.record()) is not None:
            return record
        time.sleep(0.005)
    raise ReplicaError(f"the memory agent ended; see {directory.log}")


def stop_agent(directory: AgentDirectory) -> bool:
    """Stop the agent and free its memory; whether one ran."""
    with _alone(directory):
        record = directory.record()
        if record is not None:
            _end(directory, record)
        directory.remove()
        return record is not None


def stop_earlier_agents(job: str, location: str) -> list[AgentRecord]:
    """Stop agents of other jobs that saved to `location`, unless one of their ranks is connected.

    Returns their records. Another job token at the same location means that the earlier job ended.
    """
    stopped = []
    for directory in agent_directories():
        record, token = directory.record(), directory.token()
        if record is None or token is None or record.job == job or record.location != location:
            continue
        try:
            with Endpoint.local(directory.socket, token, timeout_s=_LOCAL_S) as agent:
                used = agent.ask("status")["trainers"] > 1  # this connection counts
        except ReplicaError:
            used = False
        if not used and stop_agent(directory):
            stopped.append(record)
    return stopped


def _listens(directory: AgentDirectory, token: bytes) -> bool:
    try:
        Endpoint.local(directory.socket, token, timeout_s=_LOCAL_S).close()
    except ReplicaError:
        return False
    return True


def _end(directory: AgentDirectory, record: AgentRecord) -> None:
    """End the process: by request, or when it does not answer, by SIGKILL."""
    token = directory.token()
    try:
        if token is None:
            raise ReplicaError("there is no token")
        with Endpoint.local(directory.socket, token, timeout_s=_STOP_S) as agent:
            agent.ask("stop")
        if _ended(record):
            return
    except ReplicaError:
        pass  # stopped by a signal, or damaged: its memory must be freed all the same
    _kill(record)
    if not _ended(record):
        raise ReplicaError(f"the memory agent {record.pid} cannot be ended")


def _kill(record: AgentRecord) -> None:
    """Send SIGKILL through a pidfd, so that no other process with this number is hit."""
    import signal

    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.alive:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


def _ended(record: AgentRecord) -> bool:
    until_s = time.monotonic() + _STOP_S
    while record.alive:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def _alone(directory: AgentDirectory) -> Iterator[None]:
    """Hold the lock of all starts and stops of this user on this node."""
    lock = Path(directory.path.parent) / "lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
