"""RankJob: the job of one rank, which also counts, settles and evicts on its own machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from iobench.bench import fio
from iobench.bench.contenders.base import WriterContender
from iobench.bench.counters.monitor import Counted, Counters, Usage, counted_here
from iobench.bench.data.sliced_files import Sliced
from iobench.bench.processes.job import CheckpointRef, Done, Job
from iobench.bench.ranks.members import OPERATION_S, SETUP_S
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.cold import EvictedFiles, FilesBelow, evict
from iobench.bench.targets.directory import DirectoryScratch
from iobench.checkpoint.staged import reraise
from iobench.environment import DeviceMonitor
from iobench.ranks.control import Control
from iobench.ranks.exchange import Reader, Transport
from iobench.results.records import Operation, Stored
from iobench.text import one_line
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import is_s3

RESTORES_BEGIN, RESTORES_END = "restores begin", "restores end"
"""The calls of a loop, in a control plane of their own: the loop is one command of the other."""


@dataclass(frozen=True, kw_only=True)
class Looped:
    """What a loop did: when each restore began and ended, by time.perf_counter.

    `size_bytes` are the bytes of one restore. `read_bytes` are those that the kernel counted as
    read from storage by this process, for all of them together; None without such a counter, and
    for an object store. `resident_fraction` is the largest part of the files that was in the page
    cache when a restore began. `mismatches` are the wrong tensors of the last one.
    """

    spans: tuple[tuple[float, float], ...]
    size_bytes: int
    read_bytes: int | None
    resident_fraction: float
    mismatches: int


def restore_until(
    job: Job, ref: CheckpointRef, begins: Callable[[], object], ended_s: Callable[[], float | None]
) -> Looped:
    """Restore `ref` until `ended_s` returns a time, and cut no restore short.

    `begins` is called when the first restore begins. The last one ends after the time that
    `ended_s` returns, also where this process was not running then, between two restores.
    """
    spans, resident = list[tuple[float, float]](), 0.0
    job.scrub(ref.shape, None)
    before, size_bytes, until_s = Usage.now(), 0, None
    while until_s is None or spans[-1][1] < until_s:
        resident = max(resident, _leave_the_cache(ref))
        began_s = time.perf_counter()
        if not spans:
            begins()
        done = job.restore(ref)
        spans.append((began_s, done.at_s))
        size_bytes = done.transfer.bytes
        until_s = until_s or ended_s()
    used = Usage.now() - before
    return Looped(
        spans=tuple(spans),
        size_bytes=size_bytes,
        read_bytes=used.io.get("read_bytes") if not is_s3(ref.directory) else None,
        resident_fraction=resident,
        mismatches=job.verify(ref).mismatches,
    )


def _leave_the_cache(ref: CheckpointRef) -> float:
    """Evict the files, and return the part of their bytes that stayed."""
    if is_s3(ref.directory):
        return 0.0
    left = evict(FilesBelow(ref.directory), beside=True)
    return left.resident_bytes / left.size_bytes if left.size_bytes else 0.0


class LocalTargets:
    """The storage of a run on the machine of one rank.

    With `counts`, this rank is the one that counts and settles there; on rank 0's machine the run
    itself does that. `away` says that it is another machine than that of rank 0.
    """

    def __init__(self, scratch: Sequence[str], *, counts: bool, away: bool) -> None:
        self.counts, self.away = counts, away
        directories = [Path(one) for one in scratch if not is_s3(one)]
        self._targets = [
            OpenTarget.at(DirectoryScratch(directory=one), DeviceMonitor(one))
            for one in directories
        ]

    def under(self, location: str) -> OpenTarget | None:
        """Return the target of a checkpoint; None for one in a bucket."""
        parents = Path(location).parents
        return next((one for one in self._targets if one.scratch.directory in parents), None)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Run a block, and return when earlier work of this machine has left the storage alone."""
        with ExitStack() as waits:
            if self.counts:
                for one in self._targets:
                    waits.enter_context(one.settled())
            yield


class RankJob(Job):
    """The job of one rank."""

    machine: LocalTargets | None = None
    """None where the run of rank 0 counts and settles itself."""
    replica = False
    """Whether the ranks restore together what rank 0 saved."""
    _transport: Transport | None = None
    _control: Control | None = None
    _counters: tuple[OpenTarget, Counters] | None = None
    _counted: Counted | None = None
    _fio = ExitStack()
    _measure: Callable[[], fio.FioSample] | None = None

    def prepare(
        self, shape: int, checkpoint: tuple[int, ...], sliced: Sliced | None = None
    ) -> None:
        with self._settled():
            super().prepare(shape, checkpoint, sliced)

    def scrub(self, shape: int, subset: float | None) -> None:
        with self._settled():
            super().scrub(shape, subset)

    def save(self, ref: CheckpointRef) -> Done:
        """Save every file, and sync the directories: another node cannot sync them from there."""
        done = super().save(ref)
        away = self.machine is not None and self.machine.away
        if not away or is_s3(ref.directory) or not done.transfer.files:
            return done
        for directory, _, _ in os.walk(self._own(ref.directory), topdown=False, onerror=reraise):
            sync_directory(directory)
        return replace(done, at_s=time.perf_counter())

    def join(self, control: Control) -> None:
        """Take part in the calls of `control`. Connect replicas with each other."""
        self._control = control
        if self.replica:
            self._transport = Transport(control)
            for one in self.contenders:
                one.join()

    def leave(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            self._transport.close()
            for one in self.contenders:
                one.leave()

    def restore(self, ref: CheckpointRef) -> Done:
        """Restore the subset that was given to `scrub`; replicas do it together."""
        one, replay = self._reading(ref), self.sources[ref.shape]
        if ref.restore_mode is None or not isinstance(one, WriterContender):
            return super().restore(ref)
        assert self._transport is not None  # `join` was called
        reader = Reader(self._transport, ref.restore_mode)
        return self._done(one, replay, one.restore(replay, self._from(ref), reader))

    def loop(self, ref: CheckpointRef) -> Looped:
        """Restore `ref` until rank 0 ends that; see `restore_until`. Only this rank has a job."""
        assert self._control is not None  # `join` was called
        aside, end = self._control.sub("loop", aside=True), list[Future[float]]()

        def begins() -> None:
            """Send both calls at once: no restore waits for an answer."""
            begun = aside.begin("all-gather", RESTORES_BEGIN, None, deadline_s=OPERATION_S)
            ended = aside.begin("broadcast", RESTORES_END, None, deadline_s=OPERATION_S)
            end.append(waiting.submit(lambda: (begun(), ended()[0])[1]))

        with ThreadPoolExecutor(1) as waiting:
            try:
                return restore_until(
                    self, ref, begins, lambda: end[0].result() if end[0].done() else None
                )
            except Exception as error:
                if not end:  # rank 0 waits for the first restore
                    aside.barrier(RESTORES_BEGIN, deadline_s=OPERATION_S, error=one_line(error))
                raise

    def count(self, ref: CheckpointRef) -> None:
        """Start the counters of this machine, unless another rank or the run counts there."""
        target = self.machine and self.machine.counts and self.machine.under(ref.directory)
        if target:
            self._counters = target, Counters(target.monitor)

    def all_done(self) -> None:
        """Stop the counters: all ranks are done, also the others of this machine."""
        if self._counters is not None:
            (target, counters), self._counters = self._counters, None
            assert target.instruments is not None  # of a directory
            self._counted = counted_here(
                counters,
                device_counts=target.instruments.device_counts,
                flush_counts=target.instruments.flush_counts,
            )

    def counted(self) -> Counted | None:
        """Return what this machine counted during the last timed operation of all ranks."""
        counted, self._counted = self._counted, None
        return counted

    def hand_over(self, shape: int, sources: list[int]) -> str:
        """Compare the next restore with the digests of the rank that saved it, by `sources`.

        Returns a hash of the digests that this rank saved. All ranks carry it out together.
        """
        assert self._control is not None  # `join` was called
        aside, own = self._control.sub("digests"), self.replays[shape].digests()
        given = aside.gather("digests", own, deadline_s=SETUP_S)
        there = [given[source] for source in sources] if given else None
        self.sources[shape].expect(aside.scatter("their digests", there, deadline_s=SETUP_S))
        return sha256(own.encode()).hexdigest()

    def evict(self, ref: CheckpointRef) -> EvictedFiles:
        """Remove what this rank wrote, and what it restores, from its machine's page cache.

        Counts what stays of the files that it restores.
        """
        own, source = self._own(ref.directory), self._from(ref)
        if own != source and ref.sliced is None:  # all slices are below `source`
            evict(FilesBelow(own))
        return evict(FilesBelow(source))

    def inspect(self, ref: CheckpointRef) -> Stored | None:
        """Return what this machine's page cache holds of the files of this rank."""
        target = self.machine and self.machine.under(ref.directory)
        if not target or target.instruments is None:
            return None
        return target.instruments.inspect(Path(self._own(ref.directory)), ())

    def fio_start(
        self,
        job: int,
        operation: Operation,
        directory: str,
        size_bytes: int,
        fallocate: bool,
        firsts: list[int],
    ) -> None:
        """Start a fio job on this node, up to the begin of its clock. Raises FioError.

        The first rank of each node does it: that of the node with this number in `firsts`.
        """
        if self._number not in firsts:
            return
        place = of_node(directory, firsts.index(self._number))
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            started = fio.started(fio.JOBS[job], operation, place, size_bytes, fallocate=fallocate)
            self._measure = stack.enter_context(started)
            with self._settled():
                pass
            self._fio = stack.pop_all()

    def fio_measure(self) -> fio.FioSample | None:
        """Let the job go on, and return what it measured. Raises FioError."""
        if self._measure is None:
            return None
        with self._fio.pop_all():
            measure, self._measure = self._measure, None
            return measure()

    def fio_stop(self) -> None:
        """Stop the job, if there is one."""
        self._measure = None
        with contextlib.suppress(_StopError), self._fio.pop_all():
            raise _StopError

    def _settled(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.machine is None else self.machine.settled()


def of_node(directory: Path | str, number: int) -> Path:
    """Return the directory of the fio jobs of one node: each has a file of its own."""
    return Path(directory) / f"fio-{number}"


class _StopError(Exception):
    """Ends a fio job."""
