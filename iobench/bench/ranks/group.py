"""Executor: runs the jobs of a run, in this process or in ranks: rank 0 drives, others `serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from iobench.bench import fio
from iobench.bench.counters.monitor import Counted, over_machines
from iobench.bench.processes.job import (
    RESTORES_BEGIN,
    RESTORES_END,
    CheckpointRef,
    Done,
    Job,
    Looped,
    Release,
    of_node,
)
from iobench.bench.ranks.members import OPERATION_S, SETUP_S, Members, introduce
from iobench.bench.ranks.setup import Setup, make_job
from iobench.bench.ranks.start import END, NEXT, Launched, LocalRanks
from iobench.bench.ranks.steps import Steps, message_of, reply_of
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.cold import EvictedFiles
from iobench.errors import FioError, JobError, RankError
from iobench.ranks.control import Control
from iobench.results.codec import from_plain, to_plain
from iobench.results.records import Cold, DeviceCounts, Operation, Stored, WorldFacts

_OWN_SLICES = "ranks also restored slices that their own node wrote"
_LATE = 0.01  # of an operation's time: what is less changes no figure

T = TypeVar("T")


class Executor(AbstractContextManager["Executor"]):
    """The jobs of a run: one in this process, or one in each of `ranks`, with files of its own.

    A command that raises in one rank is a JobError; the ranks go on with the next one. A rank that
    cannot be set up, is lost or ends is named by a RankError, which every later call raises too. If
    the run started the ranks itself, it is a JobError, and the next command starts new ones.
    """

    machines = 1
    """The number of machines that the jobs are on."""
    _ranks: Launched | LocalRanks
    _nodes = 1

    def __init__(
        self,
        job: Job | None = None,
        ranks: Launched | LocalRanks | None = None,
        setup: Callable[[Members], Setup] | None = None,
    ) -> None:
        """`job` is that of this process, without `ranks`; `setup` returns the set-up of ranks."""
        self._own, self._setup = job, setup
        self.apart = ranks is not None
        """Whether there are several jobs, which have a directory each and do not run here alone."""
        self._launched = ranks is not None and not ranks.local
        if ranks is not None:
            self._ranks = ranks
        self._steps: Steps | None = None
        self._others: list[Counted] = []
        """What the other machines counted during the last timed operation."""

    @property
    def job(self) -> Job:
        """The job of this process."""
        assert self._own is not None
        return self._own

    def _ready(self) -> Steps:
        """Return the part of rank 0 in commands, after the set-up of all ranks."""
        if self._steps is not None:
            return self._steps
        connected = self._ranks.connected()
        self._control = connected.control
        assert self._setup is not None  # with ranks
        given = self._setup(connected.members)
        self.members, self._same_bytes = given.members, given.sliced
        self.machines, self._nodes = len(given.members.first_of_machine), given.members.facts.nodes
        with self._losing():
            self._control.broadcast("set-up", to_plain(given), deadline_s=SETUP_S)
            if self._own is None and not given.reads:  # else it only drives the others
                self._own = make_job(given, 0)
            if self._own is not None:
                self._own.join(self._control)
            self._steps = Steps(self._control, self._own)
            self._control.barrier("start", deadline_s=SETUP_S)
        return self._steps

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Run a block in which a rank may be lost."""
        try:
            yield
        except RankError as error:
            self._steps = self._steps if self._launched else None
            self._ranks.lost(error)

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        """Run `what` in the first `count` jobs at once; return their replies in order.

        `release` is called when they begin, or just before with the moment at which they will.
        """
        if not self.apart:
            assert count == 1
            if release:
                release(None)
            return [what(self.job)]
        replies = self._all(what, release, count)
        late_s = [one.late_s for one in replies if isinstance(one, Done)]
        if release is not None:
            self._ready().lead.began(max(late_s, default=0.0))
        return replies

    def _all(
        self, what: Callable[[Any], T], release: Release | None = None, count: int | None = None
    ) -> list[T]:
        """Carry out one command in the first `count` jobs; return their replies. Raises JobError.

        The default is all of them.
        """
        steps = self._ready()
        message = self._message(what, count) | {"timed": release is not None}
        with self._losing():
            self._control.broadcast(NEXT, message, deadline_s=OPERATION_S)
            replies = steps.carry_out(message, release)
        return self._replies(what, replies)

    def _message(self, what: Callable[[Any], Any], count: int | None = None) -> dict[str, Any]:
        first = 0 if self._own else 1
        jobs = self.members.facts.size if count is None else first + count
        return message_of(what) | {"timed": False, "count": jobs}

    @contextmanager
    def looping(self, ref: CheckpointRef) -> Iterator[list[Looped | JobError]]:
        """Restore `ref` over and over in the only other rank, from before the block until after it.

        The list has the result after the block: what was restored, or the error of that. Raises
        JobError if no restore can begin.
        """
        self._ready()
        what, found = partial(Job.loop, ref=ref), list[Looped | JobError]()
        try:
            with self._losing():
                self._control.broadcast(NEXT, self._message(what), deadline_s=OPERATION_S)
                self._control.barrier("loop begins", deadline_s=OPERATION_S)
                done = self._control.begin("gather", "loop done", None, deadline_s=OPERATION_S)
                aside = self._control.sub("loop", aside=True)
                aside.barrier(RESTORES_BEGIN, deadline_s=OPERATION_S)
            yield found
            try:
                with self._losing():
                    aside.broadcast(RESTORES_END, time.perf_counter(), deadline_s=OPERATION_S)
                    found += self._replies(what, done())
            except JobError as error:
                found.append(error)
        except BaseException as error:
            self._ranks.jobs_ended(error)
            self._steps = None
            raise

    def _replies(self, what: Callable[[Any], T], replies: Sequence[Any]) -> list[T]:
        given = {
            self._ranks.named(rank): one for rank, one in enumerate(replies) if one is not None
        }
        failed = [f"{who}: {one['error']}" for who, one in given.items() if "error" in one]
        if failed:
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise JobError(f"{failed[0]}{more}")
        return [reply_of(what, one["value"], who) for who, one in given.items()]

    def hand_over(self, shape: int) -> None:
        """Give each job the digests of the files that it restores, if another job saved them."""
        if not self.apart or (self._nodes == 1 and not self.members.replicas):
            return
        sources = list(self.members.facts.restored_from)
        saved = self._all(partial(Job.hand_over, shape=shape, sources=sources))
        if self._same_bytes and len(set(saved)) > 1:
            raise JobError("the ranks saved slices of different bytes; their memory is damaged")

    def counted(self, counted: Counted) -> Counted:
        """Return `counted` of this machine with what all others counted during the operation."""
        if self.machines > 1:
            self._others = [one for one in self._all(Job.counted) if one is not None]
        return over_machines(counted, self._others)

    def notes(
        self, operation: Operation, done: Sequence[Done], device: DeviceCounts | None
    ) -> Iterator[str]:
        """Yield notes for readers of an operation's figures."""
        late_s, took_s = (
            max(one.late_s for one in done),
            max(one.transfer.elapsed_s for one in done),
        )
        if late_s > _LATE * took_s:
            yield "a process began late, by more than 1% of the time of the longest transfer"
        if device is None or not self._launched:
            return
        if any(one.device.read_bytes is None for one in self._others):
            yield "not every node counts the device of the target: its counters are not used"
        if operation == "restore":
            if note := _OWN_SLICES if self._same_bytes else self.members.restore_note:
                yield note
            if device.read_bytes is None:
                yield "the storage is not a device of every node: what its caches hold is unknown"

    def make_cold(self, target: OpenTarget, name: str, ref: CheckpointRef) -> Cold:
        """Evict the checkpoint `name` on every machine, and count what stays in page caches."""
        if target.scratch.directory is None or self._nodes == 1:
            return target.make_cold(name)
        return EvictedFiles.cold(self._all(partial(Job.evict, ref=ref)))

    def inspect(self, stored: Stored, ref: CheckpointRef) -> Stored:
        """Return `stored` of this machine with what the page caches of all others hold."""
        if self._nodes == 1:  # the run inspected the files of all ranks
            return stored
        stored = over_ranks(stored, self._all(partial(Job.inspect, ref=ref)))
        if stored.flushed is None:
            return stored
        flushed = all_true([stored.flushed, *(one.flushed for one in self._others)])
        return replace(stored, flushed=flushed)

    def facts(self) -> WorldFacts | None:
        """Return the ranks of a launcher, for the record; None without one."""
        return self.members.facts if self._launched else None

    @contextmanager
    def started(
        self,
        job: fio.FioJob,
        operation: Operation,
        directory: Path,
        size_bytes: int,
        *,
        fallocate: bool = True,
    ) -> Iterator[Callable[[], fio.FioSample]]:
        """Start a fio job on every node at once; like `fio.started`, with the sum of all nodes."""
        if not self._launched:
            with fio.started(job, operation, directory, size_bytes, fallocate=fallocate) as here:
                yield here
            return
        nodes = self.members.facts.node
        command = partial(
            Job.run_fio,
            job=fio.JOBS.index(job),
            operation=operation,
            directory=str(directory),
            size_bytes=size_bytes,
            fallocate=fallocate,
            firsts=[nodes.index(node) for node in sorted(set(nodes))],
        )

        def measure() -> fio.FioSample:
            replies = self._all(command, lambda _: None)
            samples = [one for one in replies if one is not None]
            return fio.FioSample(
                bytes=sum(one.bytes for one in samples),
                elapsed_s=max(one.elapsed_s for one in samples),
                cpu_s=sum(one.cpu_s for one in samples),
            )

        try:
            self._all(Job.settle)
            yield measure
        except JobError as error:
            if isinstance(error, RankError):
                raise
            raise FioError(str(error)) from error

    def cleanup(self, directory: Path) -> None:
        """Remove the files that fio left in `directory`, of all nodes."""
        for one in (directory, *(of_node(directory, number) for number in range(self._nodes))):
            if one.exists():
                fio.cleanup(one)

    def __enter__(self) -> Self:
        if self.apart:
            self._ready()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """End the jobs. After an error, wait until no rank can write any more."""
        if self._steps is not None:
            if self._own is not None:
                self._own.leave()
            self._ranks.jobs_ended(error)


def serve(control: Control) -> int:
    """Carry out the commands of rank 0 until it ends the run; return its exit code.

    Raises RankError when another rank is lost or failed, and what the set-up of this rank raises.
    """
    introduce(control)
    if control.broadcast("plan", deadline_s=OPERATION_S) is not None:
        setup = from_plain(Setup, control.broadcast("set-up", deadline_s=SETUP_S))
        job = make_job(setup, control.world.rank)
        job.join(control)
        try:
            steps = Steps(control, job)
            control.barrier("start", deadline_s=SETUP_S)
            while (message := control.broadcast(NEXT, deadline_s=OPERATION_S)) is not None:
                steps.carry_out(message)
        finally:
            job.leave()
    return int(control.broadcast(END, deadline_s=OPERATION_S))


def over_ranks(stored: Stored, others: Sequence[Stored | None]) -> Stored:
    """Return `stored` of rank 0's machine with the dirty pages of all other ranks' machines.

    Where one machine cannot count them, the sum is unknown unless the others have some already.
    """
    every = [stored, *(one for one in others if one is not None)]
    total = sum(one.unsynced_bytes or 0 for one in every)
    unseen = next(filter(None, (one.unseen for one in every)), "")
    return replace(
        stored,
        unsynced_bytes=None if unseen and not total else total,
        unseen=unseen,
        ignored_syncs=next(filter(None, (one.ignored_syncs for one in every)), ""),
    )


def all_true(values: Iterable[bool | None]) -> bool | None:
    """Return False if one value is, else None if one is unknown, else True."""
    found = list(values)
    if False in found:
        return False
    return None if None in found else True
