"""Ranks: real processes with torchrun's variables, which run one function each."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.preloaded import Preloaded

PATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
"""The PYTHONPATH of processes that import `tests`."""


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun_variables(
    nodes: Sequence[int], port: object, address: str = "127.0.0.1", **more: object
) -> list[dict[str, str]]:
    """The variables of torchrun of ranks on these nodes, such as [0, 0, 1], and `more`."""
    made = []
    for rank, node in enumerate(nodes):
        own = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": nodes[:rank].count(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "GROUP_RANK": node,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            **more,
        }
        made.append({name: str(value) for name, value in own.items()})
    return made


class Ranks:
    """The processes of a job, in rank order."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def line(self, rank: int) -> str:
        """Return the next line that the rank prints."""
        stdout = self.processes[rank].stdout
        return stdout.readline().strip()

    def tell(self, rank: int, line: str) -> None:
        """Send a line to a rank that was started with `stdin`."""
        stdin = self.processes[rank].stdin
        stdin.write(f"{line}\n")
        stdin.flush()

    def when(self, path: Path, timeout_s: float = 90) -> None:
        """Return when the file `path` is there."""
        until_s = time.monotonic() + timeout_s
        while not path.exists():
            assert time.monotonic() < until_s, "the ranks did not come so far"
            assert all(one.poll() is None for one in self.processes), self.ends()
            time.sleep(0.02)

    def end(self, rank: int, timeout_s: float = 90) -> tuple[int, str, str]:
        """Wait for the end of a rank; return its exit code, stdout and stderr."""
        out, err = self.processes[rank].communicate(timeout=timeout_s)
        return self.processes[rank].returncode, out, err

    def ends(self, timeout_s: float = 90) -> list[tuple[int, str, str]]:
        """Wait for the end of all ranks."""
        return [self.end(rank, timeout_s) for rank in range(len(self.processes))]


@contextlib.contextmanager
def running(
    programs: Sequence[tuple[Sequence[object], Mapping[str, str]]],
    *,
    cwd: Path | None = None,
    stdin: bool = False,
) -> Iterator[Ranks]:
    """Start one process a rank, each with its arguments of Python and more variables; kill those
    that are left at the end."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for arguments, own in programs:
            process = Preloaded(
                arguments,
                cwd=cwd,
                env={**os.environ, **own},
                stdin=subprocess.PIPE if stdin else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            processes.append(process)
        yield Ranks(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()


@contextlib.contextmanager
def start_ranks(
    code: str,
    size: int,
    *,
    environ: dict[str, str] | None = None,
    local_size: int | None = None,
    stdin: bool = False,
) -> Iterator[Ranks]:
    """Start `size` ranks that run the Python `code`."""
    nodes = [rank // (local_size or size) for rank in range(size)]
    more = {"TORCHELASTIC_RUN_ID": f"test-{os.getpid()}", "PYTHONPATH": PATH, **(environ or {})}
    variables = torchrun_variables(nodes, free_port(), **more)
    with running([(["-c", code], own) for own in variables], stdin=stdin) as ranks:
        yield ranks


def lose(code: str, victim: int, *, killed: bool = True) -> None:
    """Run two ranks until the victim has killed itself, or, unless `killed`, stopped itself; the
    other one prints its number and exits with 3."""
    with start_ranks(code, 2) as ranks:
        if killed:
            assert ranks.processes[victim].wait(60) == -signal.SIGKILL, ranks.end(victim)
        ended, out, said = ranks.end(1 - victim)
        assert (ended, out) == (3, f"lost [{victim}]\n"), said
