"""Trial: one timed save of a variant, and timed, cold, verified restores of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from iobench.bench.axes import Variant
from iobench.bench.background import Background, During
from iobench.bench.counters.monitor import Counted, Counters, make_series
from iobench.bench.processes.job import (
    CheckpointRef,
    Done,
    Job,
    StoredFile,
    manifest,
    stored_files,
)
from iobench.bench.ranks.group import Executor
from iobench.bench.targets.base import Location, OpenTarget
from iobench.bench.targets.instruments import Changes
from iobench.results import (
    Cold,
    Failure,
    MemoryUse,
    Operation,
    Sample,
    Stored,
    Verified,
    utc_now,
)
from iobench.text import one_line
from iobench.workloads.specs import FileSpec
from iobench.writers.transfer import PathCount, Transfer

_UNRECORDABLE = -1
_SHARED = ("all processes restored the same files, and those of a machine share its page cache",)

_Settled = AbstractContextManager[object]
"""Runs a block, and returns when earlier work has left the storage alone."""

T = TypeVar("T")


@dataclass(kw_only=True)
class _Timed:
    """One operation of all jobs, and what was seen right after it."""

    done: list[Done]
    counted: Counted
    started: str
    memory: MemoryUse | None = None
    commit_s: float = 0.0
    stored: Stored | None = None
    restores: During | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant at one position of one repetition.

    The clock of `save` covers everything up to the published, durable checkpoint: files, their
    syncs, the manifest, directory syncs and the rename. The clock of `restore` covers opening,
    parsing and reading. Making the bytes, evicting, verifying and removing are not timed. It
    covers the same work for one process, several, and the ranks of a launcher: the staging
    directory exists and all jobs are ready before it starts, and it stops when the last is done.

    What is prepared in memory is prepared inside `settled`, the wait for idle storage. Both have
    ended before the clock starts, and no thread or process of ours works on them afterwards.
    """

    run_id: str
    repetition: int
    order: int
    variant: Variant
    contender: int
    """Index among the executor's contenders."""
    shape: int
    """Index among the executor's shapes."""
    files: Sequence[Sequence[FileSpec]]
    """The files of each job."""
    executor: Executor
    target: OpenTarget
    among: bool = False
    """Whether other checkpoints are saved before this one is restored."""
    background: Background | None = None
    """The process that restores an earlier checkpoint meanwhile, if the variant asks for it."""
    _saved: list[Done] = field(default_factory=list, init=False)
    """The last save, in each job."""
    _changes: Changes = field(default_factory=Changes, init=False)
    """The times of the files' last changes, right after the save."""

    def save(self, settled: _Settled | None = None) -> Sample | None:
        """Save a checkpoint of fresh bytes; it stays for `restore`.

        Returns None for a contender that only restores: another writer made its checkpoint.
        """
        with settled or nullcontext():
            checkpoint = self.repetition, self.order
            self._ask(
                partial(
                    Job.prepare, shape=self.shape, checkpoint=checkpoint, sliced=self.variant.sliced
                )
            )
            if self.among:
                self._ask(partial(Job.keep, shape=self.shape, name=self._name))
        timed = self._beside(self._timed_save)
        return self._sample("save", timed) if self.variant.contender.saves else None

    def _timed_save(self) -> _Timed:
        contender = self.variant.contender
        if not contender.stores:
            return self._ended("save", *self._timed(Job.save, self._checkpoint))
        with self.target.scratch.staged(self._name) as staged:
            done, counters, started = self._timed(Job.save, staged.directory)
            # Before the commit, which flushes the device again.
            instruments = self.target.instruments
            counts = instruments is not None and instruments.flush_counts
            flushes = counters.flushes() if counts else None
            written_s = counters.elapsed_s()
            text = manifest(self.repetition, contender, self._stored(done))
            staged.publish(map(str.encode, text))
            commit_s = counters.elapsed_s() - written_s
        timed = self._ended("save", done, counters, started)
        timed.commit_s = commit_s
        if contender.saves:
            self._saved[:] = done
            timed.stored = self._inspect(flushes)
        return timed

    def _beside(self, timed: Callable[[], _Timed]) -> _Timed:
        """Return an operation, with what was restored in the background of it."""
        if self.background is None:
            return timed()
        with self.background.restoring(self.contender, self.shape) as restores:
            result = timed()
        result.restores = restores
        return result

    def restore(self, tp: int | None = None, settled: _Settled | None = None) -> Sample | None:
        """Restore the saved checkpoint, or one rank's slices of `tp`, cold, and verify it.

        Returns None for a contender that stores nothing.
        """
        if not self.variant.contender.stores:
            return None
        ref = self._ref(self._checkpoint)
        with settled or nullcontext():
            self._ask(partial(Job.scrub, shape=self.shape, tp=tp))
            if self.among:
                self._ask(partial(Job.recall, shape=self.shape, name=self._name))
        self.executor.hand_over(self.shape)
        cold = self.executor.make_cold(self.target, self._name, ref)
        timed = self._beside(self._timed_restore)
        verified = _sum(self._ask(partial(Job.verify, ref=ref)))
        timed.stored = self.target.inspect(self._name, self._files(), self._changes)
        return self._sample("restore", timed, cold=cold, verified=verified, tp=tp)

    def _timed_restore(self) -> _Timed:
        done, counters, started = self._timed(Job.restore, self._checkpoint)
        # Other processes report their end through a socket, which takes time after the last one.
        return self._ended("restore", done, counters, started, max(one.at_s for one in done))

    def saved_by(
        self, transfer: Transfer, counted: Counted, started: str, stored: Stored | None
    ) -> Sample:
        """Return the sample of saves that the caller made and counted, to judge them."""
        at_s = counted.began_s + counted.elapsed_s
        done = Done(transfer=transfer, at_s=at_s, notes=())
        timed = _Timed(done=[done], counted=counted, started=started, stored=stored)
        return self._sample("save", timed)

    def failure(self, operation: Operation, error: Exception, tp: int | None = None) -> Failure:
        """Return the record of an `operation` that raised `error`."""
        return Failure(
            run_id=self.run_id,
            repetition=self.repetition,
            order=self.order,
            setting=self.variant.setting(tp),
            operation=operation,
            error=one_line(error),
            started_at=utc_now(),
        )

    def clear(self) -> None:
        """Remove the checkpoint, if there is one."""
        self.target.scratch.remove(self._name)

    def _ask(self, what: Callable[[Job], T]) -> list[T]:
        return self.executor.ask(self.variant.numjobs, what)

    def _timed(
        self, what: Callable[..., Done], directory: Location
    ) -> tuple[list[Done], Counters, str]:
        """Return the replies, the counters, which start when the jobs are released, and that time.

        There is no sampler where it would read one machine of several.
        """
        several = self.executor.machines > 1
        began: list[tuple[Counters, str]] = []

        def release(at_s: float | None) -> None:
            started, sampler = utc_now(), None if several else self.target.sampler
            began.append((Counters(self.target.monitor, sampler, at_s), started))

        command = partial(what, ref=self._ref(directory))
        done = self.executor.ask(self.variant.numjobs, command, release)
        return done, *began[0]

    def _ended(
        self,
        operation: Operation,
        done: list[Done],
        counters: Counters,
        started: str,
        ended_s: float | None = None,
    ) -> _Timed:
        """Stop `counters`, at `ended_s` if that was before, and add what all processes counted."""
        usages = [one.usage for one in done if one.usage is not None]
        counted = self.executor.counted(counters.stop(usages, ended_s))
        memory = self._memory(operation)
        return _Timed(done=done, counted=counted, started=started, memory=memory)

    @property
    def _name(self) -> str:
        return f"step-{self.repetition}-{self.order}"

    @property
    def _checkpoint(self) -> str:
        return self.target.scratch.locate(self._name)

    def _ref(self, directory: Location) -> CheckpointRef:
        return CheckpointRef(
            contender=self.contender,
            shape=self.shape,
            directory=str(directory),
            restore_mode=self.variant.restore_mode,
            sliced=self.variant.sliced,
        )

    def _stored(self, done: Sequence[Done]) -> Iterator[StoredFile]:
        return stored_files(self.files, done, apart=self.executor.apart)

    def _files(self) -> Iterator[tuple[str, int]]:
        """Yield path and bytes of each saved file. Names and sizes of peers' files are unknown."""
        if not self.variant.contender.is_peer:
            yield from ((one.path, one.size_bytes) for one in self._stored(self._saved))

    def _inspect(self, flushes: int | None) -> Stored | None:
        """Inspect the files right after their save, and the page cache of every node."""
        stored = self.target.inspect(self._name, self._files(), self._changes)
        if stored is None:
            return stored
        if flushes is not None:
            stored = replace(stored, flushed=flushes > 0)
        return self.executor.inspect(stored, self._ref(self._checkpoint))

    def _memory(self, operation: Operation) -> MemoryUse:
        """Return the memory of the operation that just ended, before anything else is done."""
        restored = operation == "restore"
        ref = self._ref(self._checkpoint)
        used = self._ask(partial(Job.memory, ref=ref, restored=restored))
        known = [one for one in used if one is not None]
        cached: int | None = 0
        if self.executor.machines > 1:
            cached = None  # those of other machines are not counted
        elif self.variant.contender.stores:
            cached = self.target.cached_bytes(self._name)
        return MemoryUse(
            process_bytes=sum(known) if len(known) == len(used) else None,
            page_cache_bytes=cached,
        )

    def _sample(
        self,
        operation: Operation,
        timed: _Timed,
        *,
        cold: Cold | None = None,
        verified: Verified | None = None,
        tp: int | None = None,
    ) -> Sample:
        contender, done, counted = self.variant.contender, timed.done, timed.counted
        total = Transfer.concurrent([one.transfer for one in done])
        phases, paths, odd = _recordable(total)
        if timed.commit_s:
            phases["commit"] = phases.get("commit", 0.0) + timed.commit_s
        several = done if len(done) > 1 else ()
        jobs_done_s = tuple(one.at_s - counted.began_s for one in several)
        busy_s = [s for s, one in zip(jobs_done_s, several, strict=True) if one.transfer.bytes]
        device = None if self.target.scratch.directory is None else counted.device
        if device is not None and self.target.instruments is not None:
            device = self.target.instruments.seen(device)
        return Sample(
            run_id=self.run_id,
            repetition=self.repetition,
            order=self.order,
            setting=self.variant.setting(tp),
            operation=operation,
            bytes=total.bytes,
            elapsed_s=counted.elapsed_s,
            first_done_s=min(busy_s, default=counted.elapsed_s),
            last_done_s=counted.elapsed_s,
            jobs_done_s=jobs_done_s,
            jobs_bytes=tuple(one.transfer.bytes for one in several),
            late_s=max(one.late_s for one in done),
            clock_error_s=max(one.clock_error_s for one in done),
            phases_s=phases,
            paths=paths,
            retries=total.retries,
            fallbacks=total.fallbacks,
            decisions=total.decisions,
            latencies=total.latencies,
            cpu_s=counted.cpu_s,
            system_cpu_s=counted.system_cpu_s,
            memory=timed.memory,
            cold=cold,
            device=device,
            verified=verified,
            stored=timed.stored,
            durable=total.durable,
            stores=contender.stores,
            interference=counted.interference,
            background_restores=timed.restores(counted.began_s, counted.elapsed_s)
            if timed.restores
            else None,
            series=make_series(operation, counted, None if contender.is_peer else total.completed),
            notes=tuple(dict.fromkeys(note for one in done for note in one.notes))
            + odd
            + self.target.patience.notes
            + (self.target.notes if operation == "restore" else ())
            + (_SHARED if operation == "restore" and self.variant.replicas else ())
            + tuple(self.executor.notes(operation, done, device)),
            started_at=timed.started,
        )


def _recordable(
    total: Transfer,
) -> tuple[dict[str, float], dict[str, PathCount], tuple[str, ...]]:
    """Return phases and paths with -1 for what a record cannot hold, and a note for each of these.

    JSON has neither NaN nor infinity. Values below 0 make the sample INVALID.
    """
    phases, paths, notes = dict(total.phases_s), dict(total.paths), []
    for name, seconds in total.phases_s.items():
        if not math.isfinite(seconds):
            phases[name] = _UNRECORDABLE
            notes.append(f"the writer reports {seconds} s for the phase {name}")
    for name, count in total.paths.items():
        if type(count.bytes) is not int or type(count.operations) is not int:
            paths[name] = PathCount(operations=0, bytes=_UNRECORDABLE)
            notes.append(f"the writer reports {count.bytes} bytes for the path {name}")
    return phases, paths, tuple(notes)


def _sum(parts: Sequence[Verified]) -> Verified:
    return Verified(
        tensors=sum(one.tensors for one in parts),
        bytes=sum(one.bytes for one in parts),
        mismatches=sum(one.mismatches for one in parts),
    )
