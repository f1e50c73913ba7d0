"""RankGroup: the ranks of a launcher as the jobs of a run: rank 0 drives, others `serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from iobench.bench import fio
from iobench.bench.counters.monitor import Counted
from iobench.bench.counters.nodes import NodeCounts, over_machines
from iobench.bench.plan import Plan
from iobench.bench.processes.group import Executor, Release
from iobench.bench.processes.job import CheckpointRef, Done, Job
from iobench.bench.ranks.members import SETUP_S, Members, introduce
from iobench.bench.ranks.rank_job import RankJob
from iobench.bench.ranks.setup import Setup, make_job, setups, show_token
from iobench.bench.ranks.steps import END, NEXT, OPERATION_S, Steps
from iobench.bench.ranks.wire import message_of, reply_of
from iobench.bench.targets.base import Scratch
from iobench.bench.targets.cold import EvictedFiles
from iobench.errors import FioError, JobError, RankError
from iobench.ranks.control import Control
from iobench.results.codec import from_plain, to_plain
from iobench.results.records import Cold, DeviceCounts, Operation, Stored

__all__ = ["Launched", "RankGroup", "all_true", "over_ranks", "serve"]

_OWN_SLICES = "ranks also restored slices that their own node wrote"
_LATE = 0.01  # of an operation's time: what is less changes no figure
_LEAVE_S = 20.0  # torchrun kills what is left 30 s after its SIGTERM

T = TypeVar("T")


class Launched:
    """The ranks that a launcher started, before the run has its jobs. It belongs to rank 0."""

    def __init__(self, control: Control, members: Members) -> None:
        self.control, self.members = control, members
        self._planned = self._running = False

    def begin(self) -> None:
        """Tell the ranks that their set-up follows."""
        self._planned = self._running = True
        self.control.broadcast("plan", True, deadline_s=SETUP_S)

    def jobs_ended(self) -> None:
        """Tell the ranks that no command follows."""
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

    def group(self, plan: Plan, scratch: Sequence[str], warm_ups: Sequence[str]) -> RankGroup:
        """Set up the job of every rank. `scratch` is the run's own space in each target."""
        return RankGroup(self, plan, scratch, warm_ups)


class RankGroup(Executor):
    """The ranks of a launcher. Each replays the files of its rank, in a process that is there.

    A rank that cannot be set up, is lost or ends makes every call raise RankError, which names it.
    A command that raises in one rank is a JobError; the ranks go on with the next one.
    """

    apart = True
    unequal = True

    def __init__(
        self,
        launched: Launched,
        plan: Plan,
        scratch: Sequence[str],
        warm_ups: Sequence[str],
    ) -> None:
        self._launched = launched
        launched.members = replace(launched.members, replicas=plan.axes.replicas)
        self._control, self.members = launched.control, launched.members
        self._same_bytes = plan.axes.sliced
        self.machines = len(self.members.first_of_machine)
        self._nodes: list[NodeCounts] = []
        """What the other machines counted during the last timed operation."""
        given = setups(plan, self.members, scratch, warm_ups, show_token(scratch))
        launched.begin()
        self._control.scatter("set-up", [to_plain(one) for one in given], deadline_s=SETUP_S)
        job = make_job(given[0])
        job.join(self._control)
        self._steps = Steps(self._control, job)
        self._control.barrier("start", deadline_s=SETUP_S)

    def ask(self, count: int, what: Callable[[Job], T], release: Release | None = None) -> list[T]:
        assert count == self.members.size
        replies = self._all(what, release)
        if release is None:
            return replies
        late_s = [one.late_s for one in replies if isinstance(one, Done)]
        self._steps.lead.began(max(late_s, default=0.0))
        return replies

    def _all(self, what: Callable[[Any], T], release: Release | None = None) -> list[T]:
        """Carry out one command in all ranks; return their replies. Raises JobError."""
        message = message_of(what) | {"timed": release is not None, "each": False}
        self._control.broadcast(NEXT, message, deadline_s=OPERATION_S)
        return self._replies(what, self._steps.carry_out(message, release))

    def _each(self, whats: Sequence[Callable[[RankJob], T]]) -> list[T]:
        """Carry out the same method with other arguments in each rank. Raises JobError."""
        messages = [message_of(what) | {"timed": False} for what in whats]
        self._control.broadcast(NEXT, {"each": True}, deadline_s=OPERATION_S)
        own = self._control.scatter(f"own {NEXT}", messages, deadline_s=OPERATION_S)
        return self._replies(whats[0], self._steps.carry_out(own))

    def _replies(self, what: Callable[[Any], T], replies: Sequence[Any]) -> list[T]:
        failed = [
            f"{self.members.named(rank)}: {reply['error']}"
            for rank, reply in enumerate(replies)
            if "error" in reply
        ]
        if failed:
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise JobError(f"{failed[0]}{more}")
        return [
            reply_of(what, reply["value"], self.members.named(rank))
            for rank, reply in enumerate(replies)
        ]

    def hand_over(self, shape: int) -> None:
        if self.members.node_count == 1 and not self.members.replicas:
            return
        digests = self._all(partial(RankJob.digests, shape=shape))
        if self._same_bytes and len(set(digests)) > 1:
            raise JobError("the ranks saved slices of different bytes; their memory is damaged")
        self._each(
            [
                partial(RankJob.expect, shape=shape, digests=digests[source])
                for source in self.members.sources
            ]
        )

    def counted(self, counted: Counted) -> Counted:
        if self.machines > 1:
            self._nodes = [one for one in self._all(RankJob.counted) if one is not None]
        return over_machines(counted, self._nodes)

    def notes(
        self, operation: Operation, done: Sequence[Done], device: DeviceCounts | None
    ) -> tuple[str, ...]:
        return tuple(filter(None, self._notes(operation, done, device)))

    def _notes(
        self, operation: Operation, done: Sequence[Done], device: DeviceCounts | None
    ) -> Iterator[str]:
        late_s, took_s = (
            max(one.late_s for one in done),
            max(one.transfer.elapsed_s for one in done),
        )
        if late_s > _LATE * took_s:
            yield "a rank began late, by more than 1% of the time of the longest transfer"
        if device is None:
            return
        if any(one.device is None for one in self._nodes):
            yield "not every node counts the device of the target: its counters are not used"
        if operation == "restore":
            yield _OWN_SLICES if self._same_bytes else self.members.restore_note
            if device.read_bytes is None:
                yield "the storage is not a device of every node: what its caches hold is unknown"

    def make_cold(self, scratch: Scratch, name: str, ref: CheckpointRef) -> Cold:
        if scratch.directory is None:
            return super().make_cold(scratch, name, ref)
        return EvictedFiles.cold(self._all(partial(RankJob.evict, ref=ref)))

    def inspect(self, stored: Stored, ref: CheckpointRef) -> Stored:
        stored = over_ranks(stored, self._all(partial(RankJob.inspect, ref=ref)))
        if stored.flushed is None:
            return stored
        flushed = all_true([stored.flushed, *(one.flushed for one in self._nodes)])
        return replace(stored, flushed=flushed)

    @contextmanager
    def started(
        self,
        job: fio.FioJob,
        operation: Operation,
        directory: Path | str,
        size_bytes: int,
        *,
        fallocate: bool = True,
    ) -> Iterator[Callable[[], fio.FioSample]]:
        """Start `job` on every node; like `fio.started`, and the sample is the sum of all nodes."""
        firsts = self.members.first_of_node
        number = fio.JOBS.index(job)
        whats = [
            partial(
                RankJob.fio_start,
                job=number,
                operation=operation,
                directory=str(_of_node(directory, firsts.index(rank))) if rank in firsts else "",
                size_bytes=size_bytes,
                fallocate=fallocate,
            )
            for rank in range(self.members.size)
        ]
        try:
            self._each(whats)
            yield self._measured
        except JobError as error:
            if not isinstance(error, RankError):
                raise FioError(str(error)) from error
            raise
        finally:
            if not isinstance(sys.exception(), RankError | KeyboardInterrupt):
                self._all(RankJob.fio_stop)

    def _measured(self) -> fio.FioSample:
        """Let fio go on in all nodes at once; the clock ends with the last one."""
        replies = self._all(RankJob.fio_measure, lambda _: None)
        samples = [one for one in replies if one is not None]
        return fio.FioSample(
            bytes=sum(one.bytes for one in samples),
            elapsed_s=max(one.elapsed_s for one in samples),
            cpu_s=sum(one.cpu_s for one in samples),
        )

    def cleanup(self, directory: Path | str) -> None:
        """Remove the files that fio left in `directory`, of all nodes."""
        for number in range(self.members.node_count):
            if (one := _of_node(directory, number)).exists():
                fio.cleanup(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """End the jobs. After an error, wait until no rank can write any more."""
        self._steps.__exit__()
        if error is None:
            self._launched.jobs_ended()
            return
        self._control.fail(error)
        self._control.still_here(_LEAVE_S)


def _of_node(directory: Path | str, number: int) -> Path:
    """Return the directory of the fio jobs of one node: each has a file of its own."""
    return Path(directory) / f"fio-{number}"


def serve(control: Control) -> int:
    """Carry out the commands of rank 0 until it ends the run; return its exit code.

    Raises RankError when another rank is lost or failed, and what the set-up of this rank raises.
    """
    introduce(control)
    if control.broadcast("plan", deadline_s=OPERATION_S) is not None:
        setup = from_plain(Setup, control.scatter("set-up", deadline_s=SETUP_S))
        job = make_job(setup)
        job.join(control)
        with Steps(control, job) as steps:
            control.barrier("start", deadline_s=SETUP_S)
            while (message := control.broadcast(NEXT, deadline_s=OPERATION_S)) is not None:
                if message["each"]:
                    message = control.scatter(f"own {NEXT}", deadline_s=OPERATION_S)
                steps.carry_out(message)
    return int(control.broadcast(END, deadline_s=OPERATION_S))


def over_ranks(stored: Stored, others: Sequence[Stored | None]) -> Stored:
    """Return `stored` of rank 0's machine with the dirty pages of all other ranks' machines.

    Where one machine cannot count them, the sum is unknown unless the others have some already.
    """
    found = [one for one in others if one is not None]
    known = [one.unsynced_bytes for one in (stored, *found) if one.unsynced_bytes is not None]
    total = sum(known)
    unseen = next((one.unseen for one in (stored, *found) if one.unseen), "")
    return replace(
        stored,
        unsynced_bytes=None if unseen and not total else total,
        unseen=unseen,
        ignored_syncs=next(
            (one.ignored_syncs for one in (stored, *found) if one.ignored_syncs), ""
        ),
    )


def all_true(values: Iterable[bool | None]) -> bool | None:
    """Return False if one value is, else None if one is unknown, else True."""
    found = list(values)
    if False in found:
        return False
    return None if None in found else True
