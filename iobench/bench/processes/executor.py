"""Executor: runs the jobs of a run, in this process or in ranks (see `RankGroup`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from iobench.bench.counters.monitor import Counted
from iobench.bench.processes.job import CheckpointRef, Done, Job
from iobench.bench.targets.base import Scratch
from iobench.results.records import Cold, DeviceCounts, Operation, Stored

Release = Callable[[float | None], object]
"""Receives the moment of time.perf_counter at which jobs begin; None for now."""

T = TypeVar("T")


class Executor(AbstractContextManager["Executor"]):
    """The jobs of a run: one, in this process. Those in ranks are a `RankGroup`."""

    apart = False
    """Whether there are several jobs, which have a directory each and do not run here alone."""
    machines = 1
    """The number of machines that the jobs are on."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        """Run `what` in the first `count` jobs at once; return their replies in order.

        `release` is called when they begin, or just before with the moment at which they will.
        """
        assert count == 1
        if release:
            release(None)
        return [what(self.job)]

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

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """End the jobs. Of this process none has to end."""
