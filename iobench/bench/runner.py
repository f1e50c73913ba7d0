"""Runner: repetitions of interleaved saves and restores, all of them in random order."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from iobench.bench import fio
from iobench.bench.axes import Variant
from iobench.bench.contender import WriterContender
from iobench.bench.counters import Monitor
from iobench.bench.crew import Alone, Crew, Team
from iobench.bench.job import Job, Sizes
from iobench.bench.plan import Plan
from iobench.bench.sampler import Sampler
from iobench.bench.subset import text_of
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
    VariantFacts,
    WorkloadFacts,
    config_hash,
    new_run_id,
    utc_now,
)

__all__ = ["Progress", "Runner"]

_Record = Sample | CeilingSample | Failure
_WARM_UP = "warm-up"  # a checkpoint that nobody measures


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
        steps = len(plan.taking_part) * (1 + len(plan.axes.subsets))
        steps += 2 * len(fio.JOBS) if plan.measures_ceiling else 0
        self.progress.begin(1 + steps * plan.repeat.times)
        monitor = plan.target.monitor()
        with (
            plan.target.scratch() as scratch,
            self._team(scratch) as team,
            Sampler(monitor.files) as sampler,
        ):
            self.progress.step("preparing")
            run = self._header(team)
            self.results.write(run)
            trials = _Trials(
                plan=plan,
                run=run,
                team=team,
                scratch=scratch,
                monitor=monitor,
                sampler=sampler,
                progress=self.progress,
            )
            trials.warm_up()
            for record in trials.records():
                self.results.write(record)
                self.progress.result(record)

    def _team(self, scratch: Scratch) -> Team:
        """The run's own process, or as many as ever save at once."""
        setups = self.plan.setups()
        if len(setups) == 1:
            return Alone(setups[0])
        return Crew(setups, partial(Job.warm_up, directory=scratch.locate(_WARM_UP)))

    def _header(self, team: Team) -> Run:
        plan = self.plan
        machine, storage = plan.target.describe()
        asked = plan.to_dict()
        sizes = [
            team.ask(plan.axes.most_jobs, partial(Job.sizes, shape=i, subsets=plan.axes.subsets))
            for i in range(len(plan.axes.shapes))
        ]
        scale, size_bytes = plan.workload.scale, sizes[0][0].saved
        partly = plan.axes.subsets[0] is not None
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
                files=len(plan.files),
                scaled=scale is not None,
                scale=scale.text if scale else None,
                restored_bytes=sizes[0][0].restored[0] if partly else None,
            ),
            variants=tuple(_facts(plan, sizes)),
            plan=asked,
        )


def _facts(plan: Plan, sizes: Sequence[Sequence[Sizes]]) -> Iterator[VariantFacts]:
    """What the samples of each variant move; nothing where it is the same for all."""
    axes = plan.axes
    if len(axes.shapes) == len(axes.subsets) == axes.most_jobs == 1:
        return
    told = set()
    for variant in plan.variants:
        shape = axes.shapes.index(variant.shape)
        jobs = sizes[shape][: variant.numjobs]
        operations: list[tuple[Operation, str | None, int]] = [
            ("save", None, sum(job.saved for job in jobs))
        ]
        operations += [
            (
                "restore",
                None if subset is None else text_of(subset),
                sum(job.restored[i] for job in jobs),
            )
            for i, subset in enumerate(axes.subsets)
        ]
        for operation, restore_as, size in operations:
            facts = VariantFacts(
                operation=operation,
                format=variant.format,
                granularity=variant.granularity,
                restore_as=restore_as,
                numjobs=variant.numjobs,
                bytes=size,
                files=sum(len(files[shape]) for files in plan.files_of_jobs[: variant.numjobs]),
            )
            if facts not in told:
                told.add(facts)
                yield facts


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """All trials of one run, in their order."""

    plan: Plan
    run: Run
    team: Team
    scratch: Scratch
    monitor: Monitor
    sampler: Sampler
    progress: Progress

    def warm_up(self) -> None:
        """Have every contender do what it does once per process, outside any clock.

        One that fails here will fail in its trial, where that is recorded. A crew has done it.
        """
        if not self.team.apart:
            self.team.ask(1, partial(Job.warm_up, directory=self.scratch.locate(_WARM_UP)))
        self.scratch.remove(_WARM_UP)

    def records(self) -> Iterator[_Record]:
        order = random.Random(self.plan.seed)
        broken: set[fio.FioJob] = set()
        able = list(self.plan.variants)
        measured: list[Sample] = []
        began = time.monotonic()
        repetition = 0
        while self.plan.repeat.goes_on(repetition, measured, time.monotonic() - began):
            steps: list[Callable[[int, int], Iterator[_Record]]] = [
                _bound(self._variant, one, able, order)
                for one in self.plan.taking_part
                if one in able
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

    def _variant(
        self,
        repetition: int,
        order: int,
        variant: Variant,
        able: list[Variant],
        random_: random.Random,
    ) -> Iterator[_Record]:
        if variant not in able:  # its twin of an A/A failed just before
            return
        plan = self.plan
        shape = plan.axes.shapes.index(variant.shape)
        trial = Trial(
            run_id=self.run.run_id,
            repetition=repetition,
            order=order,
            variant=variant,
            contender=plan.contenders.index(variant.contender),
            shape=shape,
            files=[files[shape] for files in plan.files_of_jobs[: variant.numjobs]],
            team=self.team,
            scratch=self.scratch,
            monitor=self.monitor,
            sampler=self.sampler,
            notes=self.plan.target.notes,
        )
        subsets = list(plan.axes.subsets)
        random_.shuffle(subsets)
        operations: list[tuple[Operation, float | None, Callable[[], Sample | None]]] = [
            ("save", None, trial.save),
            *(("restore", subset, partial(trial.restore, subset)) for subset in subsets),
        ]
        try:
            for operation, subset, run in operations:
                what = f"{variant.label} {operation}{f' {text_of(subset)}' if subset else ''}"
                self._settled(what, repetition)
                try:
                    sample = run()
                except Exception as error:  # other projects raise whatever they like
                    yield trial.failure(operation, error, subset)
                    able.remove(variant)
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
