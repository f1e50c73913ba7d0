"""TrialRunner: makes trials on a real target, and measures time, counters and memory."""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from iobench.bench.axes import Variant
from iobench.bench.contenders.base import WriterContender
from iobench.bench.counters.monitor import Counters
from iobench.bench.data.replay import Replay
from iobench.bench.judging.verdict import violations
from iobench.bench.processes.job import Job
from iobench.bench.ranks.group import Executor
from iobench.bench.targets.base import OpenTarget, Target
from iobench.bench.trial import Trial
from iobench.checkpoint.manifest import name_of
from iobench.checkpoint.retention import KeepLast
from iobench.checkpoint.store import store_at
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.environment.memory import PeakMemory
from iobench.errors import DataMismatchError, TargetError, TransferError
from iobench.results import Sample, Stored, utc_now
from iobench.text import one_line
from iobench.tune.objective import SAVES, SLOTS, Measurement, Objective, Step
from iobench.tune.space import Candidate
from iobench.units import MIB, format_size
from iobench.workloads import Workload
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

_KEPT_WRITERS = 12  # writers kept open, with their staging memory
_WARM_UP_BYTES = 32 * MIB  # more than most settings have in flight


@dataclass(kw_only=True)
class TrialRunner:
    """Makes trials on one target, with the state that all of them share."""

    target: Target
    workload: Workload
    rank: int
    objective: Objective
    seed: int
    pool_bytes: int
    opened: OpenTarget = field(init=False)
    _executors: dict[int, Executor] = field(default_factory=dict, init=False)
    _writers: OrderedDict[str, Writer] = field(default_factory=OrderedDict, init=False)
    _warm_up: Bytes = field(default_factory=lambda: np.zeros(_WARM_UP_BYTES, np.uint8), init=False)
    _mark_s: float = field(default=0.0, init=False)
    _count: int = field(default=0, init=False)

    @contextmanager
    def running(self, began_s: float) -> Iterator[TrialRunner]:
        """Yield the runner with a directory or prefix of its own, removed at the end.

        `began_s`, of time.perf_counter, is the start of the time that is charged to the first
        trial.
        """
        self.target.check()
        with OpenTarget.of(self.target, sampled=False) as self.opened:
            self._mark_s = began_s
            yield self

    def __call__(self, candidate: Candidate, step: Step) -> Measurement:
        """Make one trial. An error of the candidate is in its measurement.

        Raises TargetError when the target is gone or has no room left.
        """
        began_s = time.perf_counter()
        replay = self._executor(step.size_bytes).job.replays[0]
        self._check_room(replay)
        self._count += 1
        written_bytes = replay.size_bytes() * self.objective.writes(step.verify)
        measured = Measurement(took_s=0.0, spent_s=0.0, written_bytes=written_bytes)
        try:
            with PeakMemory() as memory:
                writer, warmed = self._writer(candidate, warm_up_bytes(step.size_bytes))
                measured = replace(measured, written_bytes=measured.written_bytes + warmed)
                measured = self._measure(writer, replay, step, measured)
            measured = replace(measured, memory_bytes=memory.grown_bytes)
        except Exception as error:  # noqa: BLE001 -- writers of others raise whatever they like
            self._check_target(error)
            self._writers.pop(candidate.label, None)
            cause = one_line(error)
            measured = replace(measured, error=cause)
        now_s = time.perf_counter()
        spent_s, self._mark_s = now_s - self._mark_s, now_s
        return replace(measured, took_s=now_s - began_s, spent_s=spent_s)

    def _measure(
        self, writer: Writer, replay: Replay, step: Step, measured: Measurement
    ) -> Measurement:
        contender = WriterContender(writer)
        executor = self._executor(step.size_bytes)
        executor.job.contenders = (contender,)
        trial = Trial(
            run_id="0" * 16,
            repetition=step.round,
            order=self._count,
            variant=Variant(contender=contender),
            contender=0,
            shape=0,
            files=(replay.files,),
            executor=executor,
            target=self.opened,
        )
        try:
            if self.objective.goal == "stall":
                with self.opened.settled():
                    pass
                stall_s, saves = measure_stall(trial, replay, writer, f"stall-{self._count}")
                _check_kept(saves)
                measured = replace(measured, stall_s=stall_s)
                if not step.verify:
                    return measured
            save, restore = trial.save(self.opened.settled()), None
            _check_kept(save)
            if "restore" in self.objective.operations or step.verify:
                restore = trial.restore(settled=self.opened.settled())
                _check_kept(restore)
                if restore and restore.verified and restore.verified.mismatches:
                    raise DataMismatchError(
                        f"{restore.verified.mismatches} of {restore.verified.tensors} tensors "
                        "came back other than they were saved"
                    )
        finally:
            trial.clear()
        return replace(measured, save=_short(save), restore=_short(restore))

    def _executor(self, size_bytes: int) -> Executor:
        """Return the executor with the checkpoint of that size; contenders change by trial."""
        if size_bytes not in self._executors:
            files = self.workload.scaled(size_bytes, self.rank).files(self.rank)
            job = Job(
                contenders=(),
                files=(files,),
                pool_bytes=self.pool_bytes,
                seed=self.seed + len(self._executors),
            )
            job.replays[0].scrub()  # else its pages count as memory of the first setting
            self._executors[size_bytes] = Executor(job)
        return self._executors[size_bytes]

    def _writer(self, candidate: Candidate, warm_up_bytes: int) -> tuple[Writer, int]:
        """Return a warm writer, and the bytes that it wrote to warm up.

        Its staging memory is allocated, like that of a trainer's writer from the second save on.
        The writers used last are kept.
        """
        writer, warmed = self._writers.pop(candidate.label, None), 0
        if writer is None:
            writer, warmed = candidate.make(), warm_up_bytes
            where = self.opened.scratch.locate("warm-up")
            image = FileImage.of("file", [self._warm_up[:warm_up_bytes]])
            try:
                writer.write(image, where, durable=False)
            finally:
                self.opened.scratch.remove("warm-up")
        self._writers[candidate.label] = writer
        if len(self._writers) > _KEPT_WRITERS:
            self._writers.popitem(last=False)
        return writer, warmed

    def _check_room(self, replay: Replay) -> None:
        self.target.check()
        free = self.target.free_bytes()
        needed = replay.size_bytes() * (SLOTS + 1 if self.objective.goal == "stall" else 1)
        if free is not None and needed > free:
            raise TargetError(
                f"--target {self.target.location}: a checkpoint of {format_size(needed)} does not "
                f"fit any more, {format_size(free)} may be used; make room and go on by --resume"
            )

    def _check_target(self, error: Exception) -> None:
        """Raise TargetError where the target, and not the candidate, caused `error`."""
        self.target.check()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TargetError(
                f"--target {self.target.location}: is full; make room and go on by --resume"
            ) from error


def warm_up_bytes(size_bytes: int) -> int:
    """Return the bytes that a new writer writes before a trial of that size."""
    return min(_WARM_UP_BYTES, size_bytes // 4)


def _check_kept(sample: Sample | None) -> None:
    """Raise TransferError, which eliminates the setting, where its writer broke its contract."""
    broken = [] if sample is None else list(violations(sample))
    if sample is not None and broken:
        raise TransferError(f"INVALID {sample.operation}: {'; '.join(map(str, broken))}")


def _short(sample: Sample | None) -> Sample | None:
    """Return the sample without what a tuning does not use: bytes per 100 ms, and memory.

    A Measurement has the memory of a whole trial, with that of making the writer.
    """
    return None if sample is None else replace(sample, series=None, memory=None)


def measure_stall(trial: Trial, replay: Replay, writer: Writer, name: str) -> tuple[float, Sample]:
    """Save `replay`'s tensors five times in the background, and measure three of the stalls.

    Returns the mean seconds that a checkpoint stops training, and a sample of all five to judge
    them by, with the inspection of the last one. Three checkpoints follow one another with two
    slots. The first takes its snapshot while no save runs, the second during a background save, and
    the third waits for a slot. The slots are prepared before the warm-up. No file is left behind.
    """
    target = trial.target
    replay.prepare()
    state = {str(number): dict(tensors) for number, tensors in enumerate(replay.states)}
    where = target.scratch.locate(name)
    started, counters = utc_now(), Counters(target.monitor)
    try:
        with Checkpointer(
            where, world="alone", writer=writer, slots=SLOTS, keep=KeepLast(1)
        ) as checkpointer:
            checkpointer.prepare(state, wait=True)
            for step in range(SLOTS):
                checkpointer.save_async(state, step)
            checkpointer.wait()
            stalls = [checkpointer.save_async(state, step).stall_s for step in range(SLOTS, SAVES)]
            checkpointer.wait()
            counted = counters.stop()
            moved = Transfer.total(one.transfer for one in checkpointer.saves if one.transfer)
            stored = _inspect(target, name, where, writer)
            return sum(stalls) / len(stalls), trial.saved_by(moved, counted, started, stored)
    finally:
        target.scratch.remove(name)


def _inspect(target: OpenTarget, name: str, where: str, writer: Writer) -> Stored | None:
    if target.instruments is None:
        return None
    manifest = store_at(where, writer).manifest(SAVES - 1)
    files = [(file.path, file.size_bytes) for file in manifest.files]
    return target.inspect(f"{name}/{name_of(manifest.step)}", files)
