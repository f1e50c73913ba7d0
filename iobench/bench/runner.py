"""Runner: repetitions of interleaved saves and restores, all of them in random order."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

from iobench.bench import fio
from iobench.bench.axes import Variant, restore_text
from iobench.bench.background import Background
from iobench.bench.ceiling import CeilingJobs, reserves
from iobench.bench.plan import LEAST_POOL, Plan
from iobench.bench.processes.job import CheckpointSizes, Job
from iobench.bench.ranks.group import Executor
from iobench.bench.ranks.setup import setup_of, show_token
from iobench.bench.ranks.start import Launched, LocalRanks
from iobench.bench.targets.base import OpenTarget
from iobench.bench.trial import Trial
from iobench.environment import Storage
from iobench.errors import IobenchError, RankError
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
    contender_of,
    new_run_id,
    utc_now,
)
from iobench.results.result_file import RunProgress

_Record = Sample | CeilingSample | Failure
_WARM_UP = "warm-up"  # a checkpoint that is not measured


@dataclass(kw_only=True)
class Runner:
    """Carries out a plan and writes its records. `iobench.bench` has the rules that it follows."""

    plan: Plan
    results: ResultWriter
    progress: RunProgress
    launched: Launched | None = None
    """The ranks of a launcher, which take part if there are any."""
    run_id: str = field(default="", init=False)
    executor: Executor = field(init=False)
    targets: Mapping[str | None, OpenTarget] = field(init=False)
    ceilings: Sequence[CeilingJobs] = field(init=False)
    backgrounds: Mapping[str | None, Background] = field(init=False)
    dead: dict[str | None, Exception] = field(default_factory=dict, init=False)
    """The targets that failed outside of any trial, with the error: a disk that was lost."""
    before: dict[str | None, Sequence[Trial]] = field(default_factory=dict, init=False)
    """Of saves that follow each other, the last ones in each target: they are still there."""

    def run(self) -> None:
        """Write the run's header, then a record per timed operation, as each one ends.

        No file of the run stays in a target, also after an error. A contender or fio job that fails
        in a target is recorded and takes no further part there. A target that itself fails is
        recorded for all contenders and not cleaned. When no contender is left, the run ends with
        the error of the last one.
        """
        plan = self.plan
        steps = len(plan.variants_with_twins) * (1 + len(plan.axes.restores))
        steps += 2 * len(fio.JOBS) * len(plan.ceiling_targets)
        self.progress.begin(None if plan.repeat.is_sustained else 1 + steps * plan.repeat.times)
        with ExitStack() as undo:
            targets = {
                value: undo.enter_context(OpenTarget.of(target, plan.repeat.patience()))
                for value, target in plan.by_location.items()
            }
            warm_ups = [target.scratch.locate(_WARM_UP) for target in targets.values()]
            directories = [target.scratch.directory for target in targets.values()]
            self.progress.step("preparing")
            ranks = self._ranks(undo, directories[0])
            if ranks is None:
                executor = Executor(own_job(plan))
            else:
                places = [target.scratch.location for target in targets.values()]
                token = show_token(places)
                executor = Executor(
                    None,
                    ranks,
                    lambda members: setup_of(plan, members, places, warm_ups, token),
                )
            self.targets = targets
            self.executor = undo.enter_context(executor)
            run = header(plan, self.executor)
            self.results.write(run)
            self.run_id = run.run_id
            self.ceilings = [
                CeilingJobs(
                    executor=self.executor,
                    run_id=run.run_id,
                    target=value,
                    directory=Path(targets[value].scratch.location),
                    size_bytes=run.workload.bytes,
                    fallocate=reserves(plan),
                )
                for value in plan.ceiling_targets
            ]
            self.backgrounds = {
                one.target: undo.enter_context(Background(plan, one.target, targets[one.target]))
                for one in {one.target: one for one in plan.variants if one.background}.values()
            }
            self._warm_up(warm_ups)
            for record in self._records():
                self.results.write(record)
                self.progress.result(record)

    def _ranks(self, undo: ExitStack, temporary: Path | None) -> Launched | LocalRanks | None:
        """Return the ranks that take part: a launcher's, or processes that `undo` ends.

        If any variant has several processes, then those with one also run in these ranks, so that
        all have the same conditions. They have their temporary files in `temporary`.
        """
        most = self.plan.axes.most_jobs
        if self.launched is not None or most == 1:
            return self.launched
        return undo.enter_context(LocalRanks(most, temporary=temporary))

    def _warm_up(self, directories: Sequence[str]) -> None:
        """Do each contender's first-use work, outside any clock.

        A contender that fails here also fails in its trial, which records the failure. Ranks did
        this work when they were set up.
        """
        if not self.executor.apart:
            self.executor.ask(1, partial(Job.warm_up, directories=directories))
        for target in self.targets.values():
            target.scratch.remove(_WARM_UP)

    def _records(self) -> Iterator[_Record]:
        random_ = random.Random(self.plan.seed)
        remaining = list(self.plan.variants)  # without those that failed
        measured: list[Sample] = []
        began = time.monotonic()
        repetition = 0
        while self.plan.repeat.goes_on(repetition, measured, time.monotonic() - began):
            steps: list[Variant | tuple[CeilingJobs, fio.FioJob]] = [
                *(one for one in self.plan.variants_with_twins if one in remaining),
                *((ceiling, job) for ceiling in self.ceilings for job in ceiling.remaining),
            ]
            random_.shuffle(steps)
            for position, step in enumerate(steps):
                done = (
                    self._variant(repetition, position, step, remaining, random_)
                    if isinstance(step, Variant)
                    else self._ceiling(repetition, position, *step)
                )
                ended = self._failures(repetition, position, remaining)
                for record in chain(done, ended):
                    yield record
                    if isinstance(record, Sample):
                        measured.append(record)
                    elif isinstance(record, Failure):  # more repetitions cannot narrow its interval
                        left = contender_of(record)
                        measured = [one for one in measured if contender_of(one) != left]
            repetition += self.plan.checkpoints

    def _variant(
        self,
        repetition: int,
        order: int,
        variant: Variant,
        remaining: list[Variant],
        random_: random.Random,
    ) -> Iterator[_Record]:
        if variant not in remaining:  # its A/A duplicate failed just before
            return
        numbers = range(repetition, repetition + self.plan.checkpoints)
        trials = [self._trial(variant, number, order) for number in numbers]
        restores = list(self.plan.axes.restores) if self.plan.repeat.restores(repetition) else []
        random_.shuffle(restores)
        operations: list[tuple[Trial, Operation, int | None]] = [
            *((trial, "save", None) for trial in trials),
            *((trial, "restore", tp) for trial in trials for tp in restores),
        ]
        try:
            for trial, operation, tp in operations:
                what = " ".join(filter(None, [variant.label, operation, restore_text(tp)]))
                settled = self._settling(what, trial.repetition)
                if variant.target in self.dead:
                    settled.close()
                    return
                try:
                    sample = (
                        trial.save(settled) if operation == "save" else trial.restore(tp, settled)
                    )
                except RankError:  # without this rank, nothing can be measured
                    raise
                except Exception as error:  # peers may raise errors of any type
                    yield trial.failure(operation, error, tp)
                    remaining.remove(variant)
                    if not remaining:
                        raise
                    return
                if sample is not None:
                    yield sample
        finally:
            with self._dying(variant.target):
                for trial in self._outdated(trials):
                    trial.clear()

    def _outdated(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """Return the trials whose checkpoints go now, after those of `trials` were saved.

        Saves that follow each other keep the newest, as trainers do. So the next one takes other
        space, and a device cannot have its last one in a cache and write over it.
        """
        if not self.plan.repeat.is_sustained:
            return trials
        target = trials[0].variant.target
        older, self.before[target] = self.before.get(target, ()), trials
        return older

    def _trial(self, variant: Variant, repetition: int, order: int) -> Trial:
        plan = self.plan
        shape = plan.axes.shapes.index(variant.shape)
        return Trial(
            run_id=self.run_id,
            repetition=repetition,
            order=order,
            variant=variant,
            contender=plan.contenders.index(variant.contender),
            shape=shape,
            files=[files[shape] for files in plan.files_of_jobs[: variant.numjobs]],
            executor=self.executor,
            target=self.targets[variant.target],
            among=plan.checkpoints > 1,
            background=self.backgrounds[variant.target] if variant.background else None,
        )

    def _ceiling(
        self, repetition: int, order: int, jobs: CeilingJobs, job: fio.FioJob
    ) -> Iterator[_Record]:
        if jobs.target not in self.dead:
            with self._dying(jobs.target):
                yield from jobs.records(repetition, order, job, self._settled)

    def _settling(self, what: str, repetition: int) -> ExitStack:
        """Announce an operation and sync every target: they may share devices and CPUs.

        The end of the returned context waits until earlier work has left every target alone.
        """
        of = "" if self.plan.repeat.max_s is not None else f"/{self.plan.repeat.times}"
        self.progress.step(f"{repetition + 1}{of} {what}")
        with ExitStack() as waits:
            for location, target in self.targets.items():
                if location not in self.dead:
                    waits.enter_context(self._waiting(location, target))
            return waits.pop_all()

    @contextmanager
    def _waiting(self, location: str | None, target: OpenTarget) -> Iterator[None]:
        """Run a block, and wait until earlier work has left `target` alone, unless it fails."""
        with ExitStack() as wait:
            with self._dying(location):
                wait.enter_context(target.settled())
            yield
            with self._dying(location):
                wait.close()

    def _settled(self, what: str, repetition: int) -> None:
        """Announce an operation that prepares nothing; return when it may begin."""
        self._settling(what, repetition).close()

    @contextmanager
    def _dying(self, location: str | None) -> Iterator[None]:
        """Keep an error of the block as that of the target, which is then not used any more."""
        try:
            yield
        except (OSError, IobenchError) as error:
            self.dead.setdefault(location, error)

    def _failures(self, repetition: int, order: int, remaining: list[Variant]) -> Iterator[Failure]:
        """Yield a failure of each variant in a dead target; it takes no further part."""
        for variant in [one for one in remaining if one.target in self.dead]:
            error = self.dead[variant.target]
            yield self._trial(variant, repetition, order).failure("save", error)
            remaining.remove(variant)
            if not remaining:
                raise error


def own_job(plan: Plan) -> Job:
    """Return the job of a run in this process alone."""
    return Job(
        contenders=plan.contenders,
        files=plan.files_of_jobs[0],
        pool_bytes=max(plan.pool_bytes, LEAST_POOL),
        seed=plan.seed,
    )


_LISTED = 1000  # files in a record, whose lines a reader limits; there may be 100,000


def header(plan: Plan, executor: Executor) -> Run:
    """Return the header of a run that `executor` makes next, with a new id and the time now."""
    described = [target.describe() for target in plan.targets]
    storages = [storage for _, storage in described]
    several = len(storages) > 1
    asked = plan.to_dict()
    sizes = [
        executor.ask(plan.axes.most_jobs, partial(Job.sizes, shape=i, tp=plan.axes.restores))
        for i in range(len(plan.axes.shapes))
    ]
    scale, size_bytes = plan.workload.scale, sizes[0][0].saved
    reduced = ", ".join(filter(None, [scale.text if scale else None, plan.part]))
    partly = plan.axes.restores[0] is not None
    return Run(
        run_id=new_run_id(),
        started_at=utc_now(),
        command=("iobench", *sys.argv[1:]),
        config_hash=config_hash(
            {k: v for k, v in asked.items() if k != "seed"}, files=plan.listed_files()
        ),
        environment=Environment(
            machine=described[0][0],
            storage=Storage() if several else storages[0],
            storages=dict(zip(asked["targets"], storages, strict=True)) if several else {},
        ),
        workload=WorkloadFacts(
            name=plan.workload.name,
            fingerprint=plan.workload.fingerprint,
            rank=plan.rank,
            bytes=size_bytes,
            full_bytes=plan.full_bytes if scale else size_bytes,  # the plan's may be estimated
            files=len(plan.files),
            scaled=bool(reduced),
            scale=reduced or None,
            restored_bytes=sizes[0][0].restored[0] if partly else None,
        ),
        variants=tuple(_facts(plan, sizes)),
        plan={**asked, "files": list(islice(plan.listed_files(), _LISTED))},
        world=executor.facts(),
    )


def _facts(plan: Plan, sizes: Sequence[Sequence[CheckpointSizes]]) -> Iterator[VariantFacts]:
    """Yield the bytes and files of each variant's samples; nothing if they are all the same."""
    axes = plan.axes
    if len(axes.shapes) == len(axes.restores) == axes.most_jobs == 1:
        return
    given = set()
    for variant in plan.variants:
        shape = axes.shapes.index(variant.shape)
        jobs = sizes[shape][: variant.numjobs]
        operations: list[tuple[Operation, int | None, int]] = [
            ("save", None, sum(job.saved for job in jobs[: variant.saves])),
            *(
                ("restore", tp, sum(job.restored[i] for job in jobs))
                for i, tp in enumerate(axes.restores)
            ),
        ]
        for operation, tp, size in operations:
            facts = VariantFacts(
                operation=operation,
                axes=variant.setting(tp).axes,
                bytes=size,
                files=sum(len(files[shape]) for files in plan.files_of_jobs[: variant.saves]),
            )
            if facts not in given:
                given.add(facts)
                yield facts
