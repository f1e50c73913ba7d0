"""Runner: repetitions of interleaved saves and restores, all of them in random order."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from iobench.bench import fio
from iobench.bench.contender import Contender, WriterContender
from iobench.bench.counters import Monitor
from iobench.bench.plan import Plan
from iobench.bench.replay import Replay
from iobench.bench.sampler import Sampler
from iobench.bench.target import Scratch
from iobench.bench.trial import Trial
from iobench.errors import CeilingError
from iobench.results import (
    CeilingSample,
    Environment,
    Failure,
    Operation,
    ResultWriter,
    Run,
    Sample,
    WorkloadFacts,
    config_hash,
    new_run_id,
    utc_now,
)

__all__ = ["Progress", "Runner"]

_Record = Sample | CeilingSample | Failure


class Progress(Protocol):
    """Is told what the runner does; `iobench.cli` shows it on stderr."""

    def begin(self, steps: int) -> None:
        """`steps` steps of about equal size will follow."""

    def step(self, what: str) -> None:
        """The next step begins; the one before, if any, is done."""

    def result(self, record: Sample | CeilingSample | Failure) -> None:
        """A record was written."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Carries out a plan and writes its records. See `iobench.bench` for the rules it keeps."""

    plan: Plan
    results: ResultWriter
    progress: Progress

    def run(self) -> None:
        """Write the run's header, then a record per timed operation, as each one ends.

        Nothing of it stays in the target, however it ends. A contender or fio job that fails is
        recorded and left out from then on; when no contender is left, the run ends with the error
        of the last one.
        """
        plan = self.plan
        plan.check()
        replay = Replay(
            plan.files,
            pool_bytes=plan.pool_bytes,
            seed=plan.seed,
            crc=plan.crc,
            subset=plan.subset,
        )
        contenders = len(plan.taking_part) + (len(fio.JOBS) if plan.measures_ceiling else 0)
        self.progress.begin(1 + 2 * contenders * plan.repeat.times)
        monitor = plan.target.monitor()
        with plan.target.scratch() as scratch, Sampler(monitor.files) as sampler:
            self.progress.step("preparing")
            run = self._header(replay)
            self.results.write(run)
            trials = _Trials(
                plan=plan,
                run=run,
                replay=replay,
                scratch=scratch,
                monitor=monitor,
                sampler=sampler,
                progress=self.progress,
            )
            trials.warm_up()
            for record in trials.records():
                self.results.write(record)
                self.progress.result(record)

    def _header(self, replay: Replay) -> Run:
        plan = self.plan
        machine, storage = plan.target.describe()
        asked = plan.to_dict()
        scale, size_bytes = plan.workload.scale, replay.size_bytes()
        return Run(
            run_id=new_run_id(),
            started_at=utc_now(),
            command=("iobench", *sys.argv[1:]),
            config_hash=config_hash({k: v for k, v in asked.items() if k != "seed"}),
            environment=Environment(machine=machine, storage=storage),
            workload=WorkloadFacts(
                name=plan.workload.name,
                rank=plan.rank,
                bytes=size_bytes,
                full_bytes=plan.full_bytes if scale else size_bytes,  # the plan's may be estimated
                files=len(replay.files),
                scaled=scale is not None,
                scale=scale.text if scale else None,
                restored_bytes=None if plan.subset is None else sum(replay.restored_bytes),
            ),
            plan=asked,
        )


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """All trials of one run, in their order."""

    plan: Plan
    run: Run
    replay: Replay
    scratch: Scratch
    monitor: Monitor
    sampler: Sampler
    progress: Progress

    def warm_up(self) -> None:
        """Have every contender do what it does once per process, outside any clock.

        One that fails here will fail in its trial, where that is recorded.
        """
        for one in self.plan.contenders:
            with contextlib.suppress(Exception):
                one.warm_up(self.scratch.locate("warm-up"))
        self.scratch.remove("warm-up")

    def records(self) -> Iterator[_Record]:
        order = random.Random(self.plan.seed)
        broken: set[fio.FioJob] = set()
        able = list(self.plan.contenders)
        measured: list[Sample] = []
        began = time.monotonic()
        repetition = 0
        while self.plan.repeat.goes_on(repetition, measured, time.monotonic() - began):
            steps: list[Callable[[int, int], Iterator[_Record]]] = [
                _bound(self._contender, one, able) for one in self.plan.taking_part if one in able
            ]
            if self.plan.measures_ceiling:
                steps += [_bound(self._job, job, broken) for job in fio.JOBS if job not in broken]
            order.shuffle(steps)
            for position, step in enumerate(steps):
                for record in step(repetition, position):
                    yield record
                    if isinstance(record, Sample):
                        measured.append(record)
            repetition += 1

    def _contender(
        self, repetition: int, order: int, contender: Contender, able: list[Contender]
    ) -> Iterator[_Record]:
        if contender not in able:  # its twin of an A/A failed just before
            return
        trial = Trial(
            run_id=self.run.run_id,
            repetition=repetition,
            order=order,
            contender=contender,
            replay=self.replay,
            scratch=self.scratch,
            monitor=self.monitor,
            sampler=self.sampler,
            notes=self.plan.target.notes,
        )
        operations: tuple[tuple[Operation, Callable[[], Sample | None]], ...] = (
            ("save", trial.save),
            ("restore", trial.restore),
        )
        try:
            for operation, run in operations:
                self._settled(f"{contender.name} {operation}", repetition)
                try:
                    sample = run()
                except Exception as error:  # other projects raise whatever they like
                    yield trial.failure(operation, error)
                    able.remove(contender)
                    if not able:
                        raise
                    return
                if sample is not None:
                    yield sample
        finally:
            trial.clear()

    def _job(
        self, repetition: int, order: int, job: fio.FioJob, broken: set[fio.FioJob]
    ) -> Iterator[_Record]:
        operations: tuple[Operation, ...] = ("save", "restore")
        try:
            for operation in operations:
                self._settled(f"fio {job.name} {operation}", repetition)
                sample = self._run_job(repetition, order, job, operation)
                yield sample
                if sample.error:
                    broken.add(job)
                    return
        finally:
            fio.cleanup(self._directory)

    def _run_job(
        self, repetition: int, order: int, job: fio.FioJob, operation: Operation
    ) -> CeilingSample:
        size, elapsed_s, cpu_s, error = 0, 0.0, None, None
        try:
            measured = fio.run_job(
                job,
                operation,
                self._directory,
                self.run.workload.bytes,
                fallocate=self._fallocate,
            )
            size, elapsed_s, cpu_s = measured.bytes, measured.elapsed_s, measured.cpu_s
        except CeilingError as failure:
            error = str(failure)
        return CeilingSample(
            run_id=self.run.run_id,
            repetition=repetition,
            order=order,
            job=job.describe(),
            operation=operation,
            bytes=size,
            elapsed_s=elapsed_s,
            cpu_s=cpu_s,
            error=error,
        )

    def _settled(self, what: str, repetition: int) -> None:
        of = "" if self.plan.repeat.precision is not None else f"/{self.plan.repeat.times}"
        self.progress.step(f"{repetition + 1}{of} {what}")
        self.scratch.settle(self.monitor)

    @property
    def _directory(self) -> Path:
        """Where fio writes; only asked for where the plan measures a ceiling."""
        assert self.scratch.directory is not None
        return self.scratch.directory

    @property
    def _fallocate(self) -> bool:
        """Whether fio reserves space: unless no writer of this run does."""
        chosen = [
            getattr(one.writer.options, "fallocate", None)
            for one in self.plan.contenders
            if isinstance(one, WriterContender)
        ]
        return any(chosen) or not any(value is False for value in chosen)


def _bound(
    function: Callable[..., Iterator[_Record]], *last: object
) -> Callable[[int, int], Iterator[_Record]]:
    """`function` with its last arguments given."""
    return lambda repetition, order: function(repetition, order, *last)
