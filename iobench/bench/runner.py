"""Runner: repetitions of interleaved saves and restores, writers and fio jobs in random order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from iobench.bench import fio
from iobench.bench.counters import Monitor
from iobench.bench.plan import Plan
from iobench.bench.replay import Replay
from iobench.bench.target import Scratch
from iobench.bench.trial import Trial
from iobench.errors import CeilingError
from iobench.results import (
    CeilingSample,
    Environment,
    Operation,
    ResultWriter,
    Run,
    Sample,
    WorkloadFacts,
    config_hash,
    new_run_id,
    utc_now,
)
from iobench.writers.base import Writer

__all__ = ["Progress", "Runner"]


class Progress(Protocol):
    """Is told what the runner does; `iobench.cli` shows it on stderr."""

    def begin(self, steps: int) -> None:
        """`steps` steps of about equal size will follow."""

    def step(self, what: str) -> None:
        """The next step begins; the one before, if any, is done."""

    def result(self, record: Sample | CeilingSample) -> None:
        """A record was written."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Carries out a plan and writes its records. See `iobench.bench` for the rules it keeps."""

    plan: Plan
    results: ResultWriter
    progress: Progress

    def run(self) -> None:
        """Write the run's header, then a record per timed operation, as each one ends.

        Nothing of it stays in the target, however it ends. A fio job that fails is recorded and
        left out; any other failure ends the run.
        """
        plan = self.plan
        plan.check()
        files = plan.workload.files(plan.rank)
        replay = Replay(files, pool_bytes=plan.pool_bytes, seed=plan.seed, crc=plan.crc)
        contenders = len(plan.writers) + (len(fio.JOBS) if plan.measures_ceiling else 0)
        self.progress.begin(1 + 2 * contenders * plan.repeat)
        with plan.target.scratch() as scratch:
            self.progress.step("preparing")
            run = self._header(replay)
            self.results.write(run)
            trials = _Trials(
                plan=plan,
                run=run,
                replay=replay,
                scratch=scratch,
                monitor=plan.target.monitor(),
                progress=self.progress,
            )
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
            command=tuple(sys.argv),
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
    progress: Progress

    def records(self) -> Iterator[Sample | CeilingSample]:
        order = random.Random(self.plan.seed)
        broken: set[fio.FioJob] = set()
        for repetition in range(self.plan.repeat):
            contenders: list[Callable[[int, int], Iterator[Sample | CeilingSample]]] = [
                _bound(self._writer, writer) for writer in self.plan.writers
            ]
            if self.plan.measures_ceiling:
                contenders += [
                    _bound(self._job, job, broken) for job in fio.JOBS if job not in broken
                ]
            order.shuffle(contenders)
            for position, contender in enumerate(contenders):
                yield from contender(repetition, position)

    def _writer(self, repetition: int, order: int, writer: Writer) -> Iterator[Sample]:
        trial = Trial(
            run_id=self.run.run_id,
            repetition=repetition,
            order=order,
            writer=writer,
            replay=self.replay,
            scratch=self.scratch,
            monitor=self.monitor,
            notes=self.plan.target.notes,
        )
        try:
            self._settled(f"{writer.name} save", repetition)
            yield trial.save()
            self._settled(f"{writer.name} restore", repetition)
            restored = trial.restore()
            if restored is not None:
                yield restored
        finally:
            trial.clear()

    def _job(
        self, repetition: int, order: int, job: fio.FioJob, broken: set[fio.FioJob]
    ) -> Iterator[CeilingSample]:
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
        self.progress.step(f"{repetition + 1}/{self.plan.repeat} {what}")
        self.scratch.settle(self.monitor)

    @property
    def _directory(self) -> Path:
        """Where fio writes; only asked for where the plan measures a ceiling."""
        assert self.scratch.directory is not None
        return self.scratch.directory

    @property
    def _fallocate(self) -> bool:
        """Whether fio reserves space: unless no writer of this run does."""
        chosen = [getattr(writer.options, "fallocate", None) for writer in self.plan.writers]
        return any(chosen) or not any(value is False for value in chosen)


def _bound(
    function: Callable[..., Iterator[Sample | CeilingSample]], *last: object
) -> Callable[[int, int], Iterator[Sample | CeilingSample]]:
    """`function` with its last arguments given."""
    return lambda repetition, order: function(repetition, order, *last)
