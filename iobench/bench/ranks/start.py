"""The ranks of a run, as its rank 0 sees them: a launcher or the run itself started them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.ranks.members import OPERATION_S, SETUP_S, Members, introduce
from iobench.errors import JobError, RankError
from iobench.ranks.control import Control
from iobench.ranks.world import OWN, World

NEXT, END = "next command", "end of the run"

_LEAVE_S = 20.0  # torchrun kills what is left 30 s after its SIGTERM
_EXIT_S = 2.0
_PROGRAM = "iobench.bench.ranks.local_rank"


def local_world(rank: int, size: int, job: str) -> World:
    """Return the world of a process among `size` of this machine that no launcher started."""
    return replace(
        World.single(),
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        job=job,
        launcher=OWN,
    )


class Launched:
    """The connected ranks of a run, before it has its jobs. It belongs to rank 0.

    A launcher starts them once: without a rank the run cannot go on.
    """

    local = False
    """Whether all ranks are processes that the run started on this machine."""

    def __init__(self, control: Control, members: Members) -> None:
        self.control, self.members = control, members
        self._planned = self._running = False

    def connected(self) -> Launched:
        """Return the ranks, whose next call is for their set-up."""
        self._planned = self._running = True
        self.control.broadcast("plan", True, deadline_s=SETUP_S)
        return self

    def named(self, rank: int) -> str:
        """Return how messages name a rank."""
        return self.members.facts.named(rank)

    def lost(self, error: RankError) -> NoReturn:
        """Raise what becomes of the loss of a rank, in an `except` block."""
        raise error

    def jobs_ended(self, error: BaseException | None) -> None:
        """Say that no command follows. After an error, wait until no rank can write any more."""
        if error is not None:
            self.control.fail(error)
            self.control.still_here(_LEAVE_S)
            return
        self.control.broadcast(NEXT, None, deadline_s=OPERATION_S)
        self._running = False

    @property
    def waiting(self) -> bool:
        """Whether the ranks wait for a plan or for the end, and none of them works."""
        return not self._running

    def end(self, exit_code: int) -> None:
        """End the other ranks, with this exit code."""
        if not self._planned:
            self.control.broadcast("plan", None, deadline_s=SETUP_S)
        self.control.broadcast(END, exit_code, deadline_s=SETUP_S)


class LocalRanks(AbstractContextManager["LocalRanks"]):
    """Ranks of this machine: this process is rank 0, and starts the others.

    They are killed at the end of the `with` block, when one of them is lost, and when this process
    ends in any way. After a loss, `connected` starts new ones. Their temporary files are in
    `temporary`, where the caller removes what a killed process leaves; None is the usual directory.

    The children are new programs, not forks. A fork copies only the calling thread: a lock that
    another thread holds would stay locked in the child.
    """

    local = True

    def __init__(self, size: int, *, temporary: Path | None = None, name: str = "") -> None:
        """`name` is that of the only other rank, for messages."""
        self._size, self._name = size, name
        self._environment = {"TMPDIR": str(temporary)} if temporary else {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._control: Control | None = None

    def connected(self) -> Launched:
        """Start the ranks. Return them when their next call is for their set-up.

        Raises JobError when one of them ends.
        """
        self.stop()
        job = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with deferred_interrupts():  # every started child is in the list: `stop` kills it
                for rank in range(1, self._size):
                    self._children.append(self._started(rank, job))
            for rank, child in enumerate(self._children, 1):
                assert child.stdout is not None
                if not child.stdout.read(1):
                    raise RankError("it did not start", ranks=[rank])
            self._control = Control.connect(local_world(0, self._size, job))
            members = introduce(self._control)
            assert members is not None
            return Launched(self._control, members).connected()
        except RankError as error:
            self.lost(error)

    def _started(self, rank: int, job: str) -> subprocess.Popen[bytes]:
        # A new session: the terminal sends Ctrl-C only to this process, which ends them.
        # -P: Python would put the working directory first in sys.path.
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", _PROGRAM),
                *(str(rank), str(self._size), job, str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | self._environment,
            start_new_session=True,
        )

    def named(self, rank: int) -> str:
        return self._name or f"process {rank + 1} of {self._size}"

    def lost(self, error: RankError) -> NoReturn:
        """End all ranks, and raise JobError: a later `connected` starts new ones."""
        rank = next((one for one in error.ranks if 0 < one <= len(self._children)), 0)
        why = f": {error}"
        if rank:
            try:
                code = self._children[rank - 1].wait(_EXIT_S)
            except subprocess.TimeoutExpired:  # it is silent, perhaps stopped
                pass
            else:
                why = f" ended with exit code {code} ({error})"
                if code < 0:
                    why = f" was ended by {signal.Signals(-code).name}"
        self.stop()
        raise JobError(f"{self.named(rank)}{why}") from None

    def jobs_ended(self, error: BaseException | None) -> None:  # noqa: ARG002 -- they end anyway
        self.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the ranks and wait for their end: after that they write nothing."""
        with deferred_interrupts():
            for child in self._children:
                child.kill()
            for child in self._children:
                child.wait()
                assert child.stdout is not None
                child.stdout.close()
            self._children = []
            if self._control is not None:
                self._control.close()
                self._control = None
