"""Job: the part of one process in a run, with its own files and memory, and all contenders.

A job of a rank also counts, settles and evicts on its own machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Literal

from iobench import linux
from iobench.bench import fio
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.counters.monitor import Counted, Counters, Usage
from iobench.bench.data.replay import Replay
from iobench.bench.data.sliced_files import Sliced, SlicedFiles, Slicing
from iobench.bench.ranks.members import OPERATION_S, SETUP_S
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.cold import EvictedFiles, FilesBelow, evict
from iobench.bench.targets.directory import LocalTargets
from iobench.checkpoint.store import reraise
from iobench.environment.memory import peak_bytes, private_bytes, reset_peak
from iobench.ranks.control import Control
from iobench.ranks.exchange import Reader, Transport
from iobench.ranks.restore_plan import RestoreMode
from iobench.results.records import Operation, Stored, Verified
from iobench.text import one_line
from iobench.workloads.specs import FileFormat, FileSpec
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Meter, Transfer

RESTORES_BEGIN, RESTORES_END = "restores begin", "restores end"
"""The calls of a loop, in a control plane of their own: the loop is one command of the other."""


class OperationMemory:
    """Measures one operation after the other, all outside their clocks.

    `settle`, prepare the operation, `begin`, the operation with its clock, `used`. The operations
    of several contenders may alternate. What one leaves is known at the next `settle`, and counts
    as memory of its own later operations: they use it again.
    """

    def __init__(self) -> None:
        self._keeper: Contender | None = None
        self._resident: int | None = None
        self._private: int | None = None

    def settle(self) -> None:
        """Return freed memory to the system, and note what the last operation kept."""
        linux.trim_heap()
        now, keeper = private_bytes(), self._keeper
        if keeper is not None and now is not None and self._private is not None:
            keeper.kept_bytes = max(0, keeper.kept_bytes + now - self._private)
        self._keeper = None

    def begin(self) -> None:
        """Call it right before the operation."""
        self._resident, self._private = reset_peak(), private_bytes()

    def used(self, keeper: Contender, results_bytes: int = 0) -> int | None:
        """Return the most memory that the operation of `keeper` used; None if unknown.

        Without `results_bytes`: tensors that it made, and that still exist. A mapped file would
        count as resident memory and as page cache. So memory of an operation that maps files is
        that at its end, without the mapped pages.
        """
        self._keeper = keeper
        before = self._private if keeper.maps_files else self._resident
        peak = private_bytes() if keeper.maps_files else peak_bytes()
        if before is None or peak is None:
            return None
        return keeper.kept_bytes + max(0, peak - before - results_bytes)


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint that a job moves: the indices of its contender and shape, and its location.

    `restore_mode` is how ranks restore it together; None: each restores files of its own. With
    `sliced`, the jobs save the same files once, and each restores all of them.
    """

    contender: int
    shape: int
    directory: str
    restore_mode: RestoreMode | None = None
    sliced: Sliced | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """Bytes of a job's checkpoint as our formats write it, and of each way to restore it."""

    saved: int
    restored: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a job's save or restore: the sum of its transfers, and the time of its end.

    `at_s` is read from time.perf_counter. On Linux that is CLOCK_MONOTONIC, the same clock in all
    processes of a machine. Another process than the run's own fills in `usage`; for a job in the
    run's own process the caller counts it.
    """

    transfer: Transfer
    at_s: float
    notes: tuple[str, ...]
    file_bytes: Sequence[int] = ()
    """Of a save, the bytes of each file."""
    slices: Sequence[tuple[int, ...]] = ()
    """Of a save in slices in their place: number of the file, start and stop of each slice."""
    usage: Usage | None = None
    late_s: float = 0.0
    """How long after the common release it began."""
    clock_error_s: float = 0.0
    """By how much `at_s` may be wrong, where it was read from another clock."""


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


class Job:
    """Prepares, saves, restores and verifies; everything but `save` and `restore` is untimed.

    Replays of all shapes share one pool: only one of them is in use at a time. `prepare` comes
    before each save, `scrub` before each restore, and `memory` right after their clock.
    """

    def __init__(
        self,
        *,
        contenders: tuple[Contender, ...],
        files: tuple[Sequence[FileSpec], ...],
        pool_bytes: int,
        seed: int,
        number: int | None = None,
        source: int | None = None,
        source_files: tuple[Sequence[FileSpec], ...] = (),
        nodes: tuple[int, ...] = (),
        machine: LocalTargets | None = None,
        replica: bool = False,
    ) -> None:
        """`files` are those of each shape of the run.

        With a `number`, the job's files are in the directory `own_name(number)` of each checkpoint.
        With a `source`, the job restores the files of the job with that number, `source_files`.
        Jobs that save the same bytes in slices have one `seed`, and `nodes` has their nodes.
        Without a `machine` the run of rank 0 counts and settles itself. A `replica` restores what
        rank 0 saved, together with the other ranks.
        """
        self._machine, self._replica = machine, replica
        self._transport: Transport | None = None
        self._control: Control | None = None
        self._counters: tuple[OpenTarget, Counters] | None = None
        self._counted: Counted | None = None
        self.contenders, self._nodes = contenders, nodes
        self._slicings: dict[tuple[int, Sliced], Slicing] = {}
        self._number, self._source = number, source
        self._memory = OperationMemory()
        self._kept: dict[str, str] = {}
        every = (*files, *source_files)
        self._pool = pool = Replay.pool_for(every, pool_bytes=pool_bytes, seed=seed)
        replays = [
            Replay(one, pool_bytes=pool_bytes, seed=seed, pool=pool, rank=number or 0)
            for one in every
        ]
        self.replays = replays[: len(files)]
        self.sources = replays[-len(files) :]
        """The replays that restores fill: the same ones, or those of another job's files."""

    def sizes(self, shape: int, tp: Sequence[int | None]) -> CheckpointSizes:
        """Return the sizes of all files, and those that a restore moves, of each of `tp`."""
        replay, restored = self.sources[shape], []
        for ranks in tp:
            replay.want(ranks)
            self.replays[shape].want(ranks)  # so that a save keeps the digests for it
            restored.append(sum(replay.restored_bytes))
        return CheckpointSizes(saved=self.replays[shape].size_bytes(), restored=tuple(restored))

    def warm_up(self, directories: Sequence[str]) -> None:
        """Do each contender's first-use work. Errors are ignored: its save raises them again."""
        for directory, one in product(directories, self.contenders):
            with contextlib.suppress(Exception):
                one.check_scheme(directory)
                one.warm_up(self._own(directory))

    def prepare(
        self, shape: int, checkpoint: tuple[int, ...], sliced: Sliced | None = None
    ) -> None:
        """Make the bytes of the checkpoint with these numbers, its repetition and its order."""
        with self._settled():
            self._memory.settle()
            if sliced is not None:
                self._slicing(shape, sliced)
            self.replays[shape].want(None)
            self.replays[shape].prepare(checkpoint if sliced is not None else ())
            linux.trim_heap()  # what planning freed too: 20 MiB after a plan of 100,000 files
            self._memory.begin()

    def keep(self, shape: int, name: str) -> None:
        """Keep the digests of what was prepared: other checkpoints are saved before its restore."""
        self._kept[name] = self.replays[shape].digests()

    def recall(self, shape: int, name: str) -> None:
        """Expect from the next restore what `keep` kept under this name.

        What this job saved: where another one restores it, `hand_over` takes it there.
        """
        self.replays[shape].expect(self._kept[name])

    def save(self, ref: CheckpointRef) -> Done:
        """Save every file; each is durable, except for its directory entry.

        The entries of another machine's rank are durable too: rank 0 cannot sync them from there.
        """
        done = self._saved(ref)
        away = self._machine is not None and self._machine.away
        if not away or is_s3(ref.directory) or not done.transfer.files:
            return done
        for directory, _, _ in os.walk(self._own(ref.directory), topdown=False, onerror=reraise):
            sync_directory(directory)
        return replace(done, at_s=time.perf_counter())

    def _saved(self, ref: CheckpointRef) -> Done:
        one, replay = self.contenders[ref.contender], self.replays[ref.shape]
        if not len(replay.files):
            return self._done(one, replay, _nothing(one.name, "write"))
        if isinstance(one, WriterContender) and ref.sliced is not None:
            ranges = self._slicing(ref.shape, ref.sliced).ranges[self._number or 0]
            if not ranges:
                return self._done(one, replay, _nothing(one.name, "write"))
            transfer = replay.save(one.writer, self._own(ref.directory), ranges=ranges)
            return replace(self._done(one, replay, transfer), slices=ranges)
        if ref.sliced is not None and self._number:  # a peer saves in the first process
            return self._done(one, replay, _nothing(one.name, "write"))
        done = self._done(one, replay, one.save(replay, self._own(ref.directory)))
        return replace(done, file_bytes=replay.file_bytes)

    def _slicing(self, shape: int, sliced: Sliced) -> Slicing:
        """Return the slices of the files in one shape; they are computed once."""
        if (shape, sliced) not in self._slicings:
            replay, nodes = self.replays[shape], self._nodes[: sliced.jobs]
            paths = (spec.path for spec in replay.files)
            made = Slicing(paths, replay.file_bytes, nodes or (0,), sliced.how)
            self._slicings[shape, sliced] = made
        return self._slicings[shape, sliced]

    def scrub(self, shape: int, tp: int | None) -> None:
        """Change all memory that the next restore fills; with `tp` it reads slices."""
        with self._settled():
            self._memory.settle()
            self.replays[shape].states.release()
            self.sources[shape].want(tp)
            self.sources[shape].scrub()
            self._memory.begin()

    def restore(self, ref: CheckpointRef) -> Done:
        """Restore what was given to `scrub`; replicas do it together."""
        reading, replay = self._reading(ref), self.sources[ref.shape]
        if ref.restore_mode is not None and isinstance(reading, WriterContender):
            assert self._transport is not None  # `join` was called
            reader = Reader(self._transport, ref.restore_mode)
            transfer = reading.restore(replay, self._from(ref), reader)
            return self._done(reading, replay, transfer)
        one = self.contenders[ref.contender]
        if not len(replay.files):
            return self._done(one, replay, _nothing(one.name, "read"))
        return self._done(one, replay, reading.restore(replay, self._from(ref)))

    def memory(self, ref: CheckpointRef, *, restored: bool) -> int | None:
        """Return the most bytes of memory that the last operation used; None if unknown.

        Tensors that a restore allocated do not count. See `OperationMemory`.
        """
        one, source = self.contenders[ref.contender], self.sources[ref.shape]
        fresh = one.fresh or source.cut is not None
        tensors = sum(source.restored_bytes) if restored and fresh else 0
        return self._memory.used(one, tensors)

    def verify(self, ref: CheckpointRef) -> Verified:
        """Compare the restored tensors with the saved ones, and free them."""
        replay = self.sources[ref.shape]
        verified = self._reading(ref).verify(replay, self._from(ref))
        if self._source is not None:
            self._pool.intact = False  # it holds another job's bytes, which are in its checkpoint
        linux.trim_heap()  # the next contender gets no memory that this one freed
        return verified

    def join(self, control: Control) -> None:
        """Take part in the calls of `control`. Connect replicas with each other."""
        self._control = control
        if self._replica:
            self._transport = Transport(control)
            for one in self.contenders:
                one.join()

    def leave(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            self._transport.close()
            for one in self.contenders:
                one.leave()

    def loop(self, ref: CheckpointRef) -> Looped:
        """Restore `ref` until rank 0 ends that; see `_restore_until`. Only this rank has a job."""
        assert self._control is not None  # `join` was called
        aside, end = self._control.sub("loop", aside=True), list[Future[float]]()

        def begins() -> None:
            aside.barrier(RESTORES_BEGIN, deadline_s=OPERATION_S)
            end.append(waiting.submit(aside.broadcast, RESTORES_END, deadline_s=OPERATION_S))

        with ThreadPoolExecutor(1) as waiting:
            try:
                return self._restore_until(
                    ref, begins, lambda: end[0].result() if end[0].done() else None
                )
            except Exception as error:
                if not end:  # rank 0 waits for the first restore
                    aside.barrier(RESTORES_BEGIN, deadline_s=OPERATION_S, error=one_line(error))
                raise

    def _restore_until(
        self, ref: CheckpointRef, begins: Callable[[], object], ended_s: Callable[[], float | None]
    ) -> Looped:
        """Restore `ref` until `ended_s` returns a time, and cut no restore short.

        `begins` is called when the first restore begins. The last one ends after the time that
        `ended_s` returns, also where this process was not running then, between two restores.
        """
        spans, resident = list[tuple[float, float]](), 0.0
        self.scrub(ref.shape, None)
        before, size_bytes, until_s = Usage.now(), 0, None
        while until_s is None or spans[-1][1] < until_s:
            if not is_s3(ref.directory):
                left = evict(FilesBelow(ref.directory), beside=True)
                resident = max(resident, left.resident_bytes / max(left.size_bytes, 1))
            began_s = time.perf_counter()
            if not spans:
                begins()
            done = self.restore(ref)
            spans.append((began_s, done.at_s))
            size_bytes = done.transfer.bytes
            until_s = until_s or ended_s()
        used = Usage.now() - before
        return Looped(
            spans=tuple(spans),
            size_bytes=size_bytes,
            read_bytes=used.io.get("read_bytes") if not is_s3(ref.directory) else None,
            resident_fraction=resident,
            mismatches=self.verify(ref).mismatches,
        )

    def count(self, ref: CheckpointRef) -> None:
        """Start the counters of this machine, unless another rank or the run counts there."""
        target = self._machine and self._machine.counts and self._machine.under(ref.directory)
        if target:
            self._counters = target, Counters(target.monitor)

    def all_done(self) -> None:
        """Stop the counters: all ranks are done, also the others of this machine."""
        if self._counters is not None:
            (target, counters), self._counters = self._counters, None
            instruments = target.instruments
            assert instruments is not None  # of a directory
            flushes = counters.flushes() if instruments.flush_counts else None
            counted = counters.stop()
            self._counted = replace(
                counted,
                device=instruments.seen(counted.device),
                flushed=None if flushes is None else flushes > 0,
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
        target = self._machine and self._machine.under(ref.directory)
        if not target or target.instruments is None:
            return None
        return target.instruments.inspect(Path(self._own(ref.directory)), ())

    def settle(self) -> None:
        """Return when earlier work has left the storage of this machine alone."""
        with self._settled():
            pass

    def run_fio(
        self,
        job: int,
        operation: Operation,
        directory: str,
        size_bytes: int,
        fallocate: bool,
        firsts: list[int],
    ) -> fio.FioSample | None:
        """Run a fio job on this node. Raises FioError.

        The first rank of each node does it: that of the node with this number in `firsts`.
        """
        if self._number not in firsts:
            return None
        place = of_node(directory, firsts.index(self._number))
        place.mkdir(parents=True, exist_ok=True)
        started = fio.started(fio.JOBS[job], operation, place, size_bytes, fallocate=fallocate)
        with started as measure:
            return measure()

    def _settled(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._machine is None else self._machine.settled()

    def _own(self, directory: str) -> str:
        return directory if self._number is None else f"{directory}/{own_name(self._number)}"

    def _from(self, ref: CheckpointRef) -> str:
        """Return where the files are that restores read."""
        if ref.sliced is not None:
            peer = self.contenders[ref.contender].is_peer
            return f"{ref.directory}/{own_name(0)}" if peer else ref.directory
        if self._source is None:
            return self._own(ref.directory)
        return f"{ref.directory}/{own_name(self._source)}"

    def _reading(self, ref: CheckpointRef) -> Contender:
        """Return what restores the checkpoint; it reads files in slices like whole ones."""
        one = self.contenders[ref.contender]
        if ref.sliced is None or not isinstance(one, WriterContender):
            return one
        slices = self._slicing(ref.shape, ref.sliced).slices
        return WriterContender(SlicedFiles(one.writer, ref.directory, slices, own_name))

    @staticmethod
    def _done(one: Contender, replay: Replay, transfer: Transfer) -> Done:
        at_s = time.perf_counter()
        return Done(transfer=transfer, at_s=at_s, notes=one.notes(replay))


def _nothing(name: str, operation: Literal["write", "read"]) -> Transfer:
    """Return the transfer of a rank that has no files."""
    return Meter().transfer(name, operation, 0, durable=True, files=0)


def own_name(number: int) -> str:
    """Return the name of a job's directory in the directory of a checkpoint."""
    return f"job-{number}"


def of_node(directory: Path | str, number: int) -> Path:
    """Return the directory of the fio jobs of one node: each has a file of its own."""
    return Path(directory) / f"fio-{number}"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in the checkpoint; a slice has the bytes of a file of the workload from `start` on."""

    path: str
    format: FileFormat
    size_bytes: int
    start: int | None = None
    """None without slices."""


def stored_files(
    files: Sequence[Sequence[FileSpec]], done: Sequence[Done], *, apart: bool
) -> Iterator[StoredFile]:
    """Yield what each job has saved. `files` are those of each job, which is `apart` or alone."""
    for number, (specs, one) in enumerate(zip(files, done, strict=True)):
        below = f"{own_name(number)}/" if apart else ""
        for item, start, stop in one.slices:
            spec = specs[item]
            yield StoredFile(
                path=f"{below}{spec.path}",
                format=spec.format,
                size_bytes=stop - start,
                start=start,
            )
        for spec, size in zip(specs if one.file_bytes else (), one.file_bytes, strict=True):
            yield StoredFile(path=f"{below}{spec.path}", format=spec.format, size_bytes=size)


def manifest(step: int, contender: Contender, files: Iterable[StoredFile]) -> Iterator[str]:
    """Yield the manifest as JSON, file by file: there may be 100,000."""
    head = {
        "schema": "iobench.manifest/1",
        "step": step,
        "writer": {"name": contender.name, "options": dict(contender.options)},
    }
    yield f'{json.dumps(head)[:-1]}, "files": ['
    between = "\n"
    for one in files:
        entry = f'"path": {_quoted(one.path)}, "format": "{one.format}", "bytes": {one.size_bytes}'
        start = "" if one.start is None else f', "start": {one.start}'
        yield f"{between}{{{entry}{start}}}"
        between = ",\n"
    yield "\n]}"


Release = Callable[[float | None], object]
"""Receives the moment of time.perf_counter at which jobs begin; None for now."""
