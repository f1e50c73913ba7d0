"""AgentDirectory: where an agent of this user leaves its socket, token and address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from iobench.environment.kernelfs import read_text
from iobench.ranks.rendezvous import runtime_directory, runtime_path
from iobench.replicas.endpoint import Address
from iobench.text import parse_json

__all__ = ["AgentDirectory", "AgentRecord", "agent_directories", "job_of"]

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
