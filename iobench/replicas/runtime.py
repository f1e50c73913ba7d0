"""The agents of this user on this node: their files, and how they are started and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from iobench.environment.kernelfs import read_text
from iobench.errors import ReplicaError
from iobench.ranks.rendezvous import runtime_directory, runtime_path
from iobench.replicas.protocol import Address, AgentDone, AgentStatus, Facts, Stop, connect
from iobench.text import parse_json

__all__ = [
    "AgentDirectory",
    "AgentRecord",
    "AgentSettings",
    "agent_directories",
    "job_of",
    "start_agent",
    "stop_agent",
    "stop_earlier_agents",
]

_START_S = 60.0
_STOP_S = 10.0
_LOCAL_S = 30.0
_RUN_IDS = ("IOBENCH_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID")


def job_of(location: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the name of the job, the same after a restart by its launcher.

    It is the launcher's run id (torchrun's `--rdzv-id`, Slurm's job id; IOBENCH_JOB overrides it)
    and the location of the checkpoints.
    """
    found = os.environ if environ is None else environ
    run = next((found[name] for name in _RUN_IDS if found.get(name)), "")
    return f"{run} {location}"


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """What an agent writes down. `started` is the start of its process, in clock ticks."""

    pid: int
    started: str
    job: str
    location: str
    address: Address

    @property
    def alive(self) -> bool:
        """Whether the process still runs: the same one, and not another one with its number."""
        return start_of(self.pid) == self.started


def start_of(pid: int) -> str | None:
    """Return the start time of a process that runs, in clock ticks after boot (proc(5))."""
    fields = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """`host` is the address of the interface to listen on."""

    directory: str
    host: str
    job: str
    location: str
    keep_s: float


class AgentDirectory:
    """The files of one job's agent on this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket, self.log = path / "agent.sock", path / "agent.log"
        self._token, self._record = path / "token", path / "agent.json"

    @classmethod
    def of(cls, job: str) -> AgentDirectory:
        """Return the directory of the job's agent; it may not exist."""
        return cls(runtime_directory() / hashlib.sha256(job.encode()).hexdigest()[:16])

    def token(self) -> bytes | None:
        """Return the token of the job; None without one."""
        try:
            return bytes.fromhex(self._token.read_text("ascii")) or None
        except (OSError, ValueError):
            return None

    def set_token(self, token: bytes) -> None:
        """Keep the token, readable by this user only."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        _write(self._token, token.hex())

    def record(self) -> AgentRecord | None:
        """Return the record of the agent that runs; None when none does."""
        try:
            found = parse_json(self._record.read_bytes())
            host, port = found["address"]
            found = AgentRecord(**{**found, "address": (str(host), int(port))})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return found if found.alive else None

    def names(self, pid: int) -> bool:
        """Return whether the record is that of process `pid`; True if it cannot be read now."""
        try:
            found = parse_json(self._record.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        except OSError:  # such as too many open files
            return True
        return isinstance(found, dict) and found.get("pid") == pid

    def set_record(self, record: AgentRecord) -> None:
        """Write the record of the agent."""
        _write(self._record, json.dumps(asdict(record)))

    def remove(self) -> None:
        """Remove all files. What another process removed already is not an error."""
        for file in (self._record, self.socket, self._token, self.log):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()


def agent_directories() -> list[AgentDirectory]:
    """Return the directories of all agents of this user on this node."""
    if not runtime_path().exists():
        return []
    return [AgentDirectory(path) for path in sorted(runtime_directory().iterdir()) if path.is_dir()]


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, readable by this user only."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    aside.rename(path)


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
            with connect(directory.socket, token, timeout_s=_LOCAL_S) as agent:
                used = agent.ask(Facts, AgentStatus()).trainers > 1  # this connection counts
        except ReplicaError:
            used = False
        if not used and stop_agent(directory):
            stopped.append(record)
    return stopped


def _listens(directory: AgentDirectory, token: bytes) -> bool:
    try:
        connect(directory.socket, token, timeout_s=_LOCAL_S).close()
    except ReplicaError:
        return False
    return True


def _end(directory: AgentDirectory, record: AgentRecord) -> None:
    """End the process: by request, or when it does not answer, by SIGKILL."""
    token = directory.token()
    try:
        if token is None:
            raise ReplicaError("there is no token")
        with connect(directory.socket, token, timeout_s=_STOP_S) as agent:
            agent.ask(AgentDone, Stop())
        if _ended(record):
            return
    except ReplicaError:
        pass  # stopped by a signal, or damaged: its memory must be freed all the same
    _kill(record)
    if not _ended(record):
        raise ReplicaError(f"the memory agent {record.pid} cannot be ended")


def _kill(record: AgentRecord) -> None:
    """Send SIGKILL through a pidfd, so that no other process with this number is hit."""
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


@contextlib.contextmanager
def _alone(directory: AgentDirectory) -> Iterator[None]:
    """Hold the lock of all starts and stops of this user on this node."""
    lock = Path(directory.path.parent) / "lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
