"""ProcessGroup: jobs in child processes, which save and restore at the same time, like ranks.

`ask` sends a command to all processes and collects the replies. It returns when every process has
replied, so it is also a barrier: all processes are idle when the next command starts the clock.

The children are new programs, not forks. A fork copies only the calling thread: a lock that
another thread holds would stay locked in the child. The start method `spawn` of multiprocessing
would import the caller's main module in each child.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from iobench.bench.counters.monitor import Counted
from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.processes.job import CheckpointRef, Done, Job, JobSetup
from iobench.bench.processes.loop import Loop, Looped
from iobench.bench.targets.base import Scratch
from iobench.errors import JobError
from iobench.results.records import Cold, DeviceCounts, Operation, Stored

__all__ = ["Executor", "Failed", "InProcess", "ProcessGroup", "Release"]

_PROGRAM = Path(__file__).with_name("job_process.py")
_BACKGROUND = "the background process"

Release = Callable[[float | None], object]
"""Receives the moment of time.perf_counter at which jobs begin; None for now."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The reply of a process whose command raised, with the type and message of the error."""

    error: str


class Executor(AbstractContextManager["Executor"], Protocol):
    """The jobs of a run: in this process, in child processes, or in the ranks of a launcher.

    All methods but `ask` have the behaviour of jobs on this machine, which restore what they saved.
    """

    apart: bool
    """Whether there are several jobs, which have a directory each and do not run here alone."""
    machines: int = 1
    """The number of machines that the jobs are on."""
    unequal: bool = False
    """Whether jobs may have files of different sizes."""

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        """Run `what` in the first `count` jobs at once; return their replies in order.

        `release` is called when they begin, or just before with the moment at which they will.
        """

    def hand_over(self, shape: int) -> None:  # noqa: ARG002
        """Give each job the digests of the files that it restores, if another job saved them."""
        return

    def counted(self, counted: Counted) -> Counted:
        """Return `counted` of this machine with what all others counted during the operation."""
        return counted

    def make_cold(self, scratch: Scratch, name: str, ref: CheckpointRef) -> Cold:  # noqa: ARG002
        """Evict the checkpoint `name` on every machine, and count what stays in page caches."""
        return scratch.make_cold(name)

    def inspect(self, stored: Stored, ref: CheckpointRef) -> Stored:  # noqa: ARG002
        """Return `stored` of this machine with what the page caches of all others hold."""
        return stored

    def notes(
        self,
        operation: Operation,  # noqa: ARG002
        done: Sequence[Done],  # noqa: ARG002
        device: DeviceCounts | None,  # noqa: ARG002
    ) -> tuple[str, ...]:
        """Return notes for readers of an operation's figures."""
        return ()


class InProcess(Executor):
    """One job, in this process."""

    apart = False

    def __init__(self, setup: JobSetup) -> None:
        self.job = Job(setup)

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        assert count == 1
        if release:
            release(None)
        return [what(self.job)]

    def __exit__(self, *_: object) -> None:
        """Do nothing: no process has to end."""


class ProcessGroup(Executor):
    """Jobs in child processes, which are killed when the `with` block or this process ends.

    When one of them fails, `ask` kills them all and raises JobError. The next `ask` starts new
    ones. Each process runs `first` when it has started. Their temporary files are in `temporary`,
    where the caller removes what a killed process leaves; None is the usual directory.
    """

    apart = True

    def __init__(
        self,
        setups: Sequence[JobSetup],
        first: Callable[[Job], object],
        *,
        temporary: Path | None = None,
    ) -> None:
        self._setups, self._first = setups, first
        self._environment = {"TMPDIR": str(temporary)} if temporary else {}
        self._members: list[_Member] = []

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        if not self._members:
            self._start()
        if release:
            release(None)
        return self._ask(count, what)

    @property
    def started(self) -> bool:
        """Whether processes exist; none does after a failure."""
        return bool(self._members)

    @contextmanager
    def looping(self, loop: Loop) -> Iterator[list[Looped | Failed]]:
        """Run `loop` in the first process, from before the block until after it.

        The list has its result after the block. That is `Failed` if the process failed or ended
        during the block; no process exists then. Raises JobError if the loop cannot begin.
        """
        if not self._members:
            self._start()
        member, found = self._members[0], list[Looped | Failed]()
        try:
            member.send(loop, _BACKGROUND)
            member.receive(_BACKGROUND)
            yield found
            try:
                member.send(time.perf_counter(), _BACKGROUND)
                found.append(member.receive(_BACKGROUND))
            except JobError as error:
                self._stop()
                found.append(Failed(error=str(error)))
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        try:
            with deferred_interrupts():  # every started child is in the list: _stop kills it
                for _ in self._setups:
                    self._members.append(_Member(os.environ | self._environment))
            for member, setup in zip(self._members, self._setups, strict=True):
                member.send(sys.path, "a process")
                member.send(setup, "a process")
        except BaseException:
            self._stop()
            raise
        self._ask(len(self._setups), self._first)

    def _ask(self, count: int, what: Callable[[Job], T]) -> list[T]:
        asked = self._members[:count]
        answers: dict[int, T] = {}
        try:
            for number, member in enumerate(asked):
                member.send(what, f"process {number + 1} of {count}")
            waiting = dict(enumerate(asked))
            while waiting:
                ready = wait([member.connection for member in waiting.values()])
                for number in [n for n, member in waiting.items() if member.connection in ready]:
                    del waiting[number]
                    answers[number] = asked[number].receive(f"process {number + 1} of {count}")
        except BaseException:  # a late reply would be read as that of the next command
            self._stop()
            raise
        return [answers[number] for number in range(count)]

    def _stop(self) -> None:
        with deferred_interrupts():
            for member in self._members:
                member.kill()
            self._members = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


class _Member:
    """One child and the socket to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A new session: the terminal sends Ctrl-C only to this process, which ends them.
            # -P: Python would put the program's own directory first in sys.path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the parent's stdout is for the report
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self.connection: Connection = Connection(ours.detach())

    def send(self, what: object, who: str) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise JobError(f"{who} {self._end()}") from None

    def receive(self, who: str) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise JobError(f"{who} {self._end()}") from None
        if isinstance(answer, Failed):
            raise JobError(f"{who}: {answer.error}")
        return answer

    def _end(self) -> str:
        """Return how the process ended; it closed its socket just before."""
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Kill the process and wait for its end: after that it writes nothing."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
