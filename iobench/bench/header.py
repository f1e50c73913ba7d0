"""Header: the first record of a run, with its plan, environment, and the bytes of its samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from iobench.bench.plan import Plan
from iobench.bench.processes.executor import Executor
from iobench.bench.processes.job import CheckpointSizes, Job
from iobench.results import (
    Environment,
    Operation,
    Run,
    VariantFacts,
    WorkloadFacts,
    WorldFacts,
    config_hash,
    new_run_id,
    utc_now,
)

_LISTED = 1000  # files in a record, whose lines a reader limits; there may be 100,000


def header(plan: Plan, executor: Executor, world: WorldFacts | None = None) -> Run:
    """Return the header of a run that `executor` makes next, with a new id and the time now."""
    described = [target.describe() for target in plan.targets]
    storages = [storage for _, storage in described]
    several = len(storages) > 1
    asked = plan.to_dict()
    sizes = [
        executor.ask(plan.axes.most_jobs, partial(Job.sizes, shape=i, subsets=plan.axes.subsets))
        for i in range(len(plan.axes.shapes))
    ]
    scale, size_bytes = plan.workload.scale, sizes[0][0].saved
    reduced = ", ".join(filter(None, [scale.text if scale else None, plan.part]))
    partly = plan.axes.subsets[0] is not None
    return Run(
        run_id=new_run_id(),
        started_at=utc_now(),
        command=("iobench", *sys.argv[1:]),
        config_hash=config_hash(
            {k: v for k, v in asked.items() if k != "seed"}, files=plan.listed_files()
        ),
        environment=Environment(
            machine=described[0][0],
            storage={} if several else storages[0],
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
        world=world,
    )


def _facts(plan: Plan, sizes: Sequence[Sequence[CheckpointSizes]]) -> Iterator[VariantFacts]:
    """Yield the bytes and files of each variant's samples; nothing if they are all the same."""
    axes = plan.axes
    if axes.alike:
        return
    given = set()
    for variant in plan.variants:
        shape = axes.shapes.index(variant.shape)
        jobs = sizes[shape][: variant.numjobs]
        operations: list[tuple[Operation, float | None, int]] = [
            ("save", None, sum(job.saved for job in jobs[: variant.saves])),
            *(
                ("restore", subset, sum(job.restored[i] for job in jobs))
                for i, subset in enumerate(axes.subsets)
            ),
        ]
        for operation, subset, size in operations:
            facts = VariantFacts(
                operation=operation,
                axes=variant.setting(subset).axes,
                bytes=size,
                files=sum(len(files[shape]) for files in plan.files_of_jobs[: variant.saves]),
            )
            if facts not in given:
                given.add(facts)
                yield facts
