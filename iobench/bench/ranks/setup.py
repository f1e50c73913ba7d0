"""Setup: what a rank needs to replay its files, as plain values from rank 0."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iobench.bench.choose import choose
from iobench.bench.plan import LEAST_POOL, READER_POOL, Plan
from iobench.bench.processes.job import Job
from iobench.bench.ranks.members import Members
from iobench.bench.targets.directory import LocalTargets
from iobench.environment.memory import available_bytes
from iobench.errors import TargetError, UsageError
from iobench.units import count_of, format_size
from iobench.verification.imported import load_workload
from iobench.workloads.reshape import Shape
from iobench.workloads.specs import FileSpec, size_of
from iobench.writers.s3_store.target import is_s3

_TOKEN = "token"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The set-up of one rank. `workload` and `limit` give the same files in every process.

    `needs` has the contenders, by number, that take part in each target. `scratch` is the run's own
    space in each target, and `token` is the content of a file there: a rank that does not find it
    sees another directory.
    """

    number: int | None
    """None for a process that is not one of the run's jobs."""
    workload: str
    limit: tuple[int, int] | None
    """The bytes to which the workload is scaled, and the rank that writes as much then."""
    rank: int
    source: int | None = None
    source_rank: int = 0
    shapes: tuple[Shape, ...]
    writers: str
    targets: tuple[str, ...] = ()
    needs: tuple[tuple[int, ...], ...] = ()
    scratch: tuple[str, ...] = ()
    warm_ups: tuple[str, ...]
    token: str = ""
    pool_bytes: int
    local: int = 1
    """The most ranks of one node, each with a pool of this size."""
    seed: int
    sizes: tuple[int, ...]
    """The bytes of the rank's files in each shape, as rank 0 computes them."""
    counts: bool = False
    away: bool = False
    nodes_apart: bool = False
    """Whether some ranks are on other nodes than rank 0, whose run does not see their caches."""
    replicas: bool = False
    """Whether all ranks restore together what rank 0 saved."""
    nodes: tuple[int, ...] = ()
    """Where the ranks save the same bytes in slices, the node of each rank."""


def setups(
    plan: Plan,
    members: Members,
    scratch: Sequence[str],
    warm_ups: Sequence[str],
    token: str,
) -> list[Setup]:
    """Return the set-up of each rank, in rank order."""
    needs = [
        tuple(
            number
            for number, one in enumerate(plan.contenders)
            if any(v.contender is one and v.target == value for v in plan.variants)
        )
        for value in plan.axes.targets
    ]
    world, sources = members.facts, members.facts.restored_from
    return [
        Setup(
            number=number,
            workload=plan.given,
            limit=_limit(plan),
            rank=plan.ranks[number],
            source=None if sources[number] == number else sources[number],
            source_rank=plan.ranks[sources[number]],
            shapes=plan.axes.shapes,
            writers=",".join(one.label for one in plan.contenders),
            targets=tuple(one.location for one in plan.targets),
            needs=tuple(needs),
            scratch=tuple(scratch),
            warm_ups=tuple(warm_ups),
            token=token,
            pool_bytes=max(plan.pool_bytes // world.local, LEAST_POOL),
            local=world.local,
            seed=plan.seed if plan.axes.sliced else plan.seed + number,
            sizes=tuple(map(size_of, plan.files_of_jobs[number])),
            counts=number in members.first_of_machine,
            away=members.machines[number] != members.machines[0],
            nodes_apart=world.nodes > 1,
            replicas=members.replicas,
            nodes=world.node if plan.axes.sliced else (),
        )
        for number in range(world.size)
    ]


def reader_setup(plan: Plan, writers: str, warm_up: str) -> Setup:
    """Return the set-up of a process that restores in the background.

    It restores into the memory of its pool, in place. Its data repeat after the pool's size.
    """
    return Setup(
        number=None,
        workload=plan.given,
        limit=_limit(plan),
        rank=plan.ranks[0],
        shapes=plan.axes.shapes,
        writers=writers,
        warm_ups=(warm_up,),
        pool_bytes=min(READER_POOL, plan.pool_bytes),
        seed=plan.seed + plan.axes.most_jobs,
        sizes=tuple(map(size_of, plan.files_of_jobs[0])),
    )


def _limit(plan: Plan) -> tuple[int, int] | None:
    scale = plan.workload.scale
    return None if scale is None else (scale.limit_bytes, plan.rank)


def show_token(scratch: Sequence[str]) -> str:
    """Write a file into each directory by which other nodes recognise it; return its content."""
    token = secrets.token_hex(8)
    for one in scratch:
        if not is_s3(one):
            with (Path(one) / _TOKEN).open("x") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())
    return token


def make_job(setup: Setup) -> Job:
    """Return the job of this rank after its first-use work.

    Raises TargetError where a target is not the directory that rank 0 uses, UnavailableError where
    a writer does not work here, and UsageError for a workload file that differs from rank 0's.
    """
    _check_shared(setup)
    _check_memory(setup)
    contenders, _ = choose(setup.writers, *setup.targets)
    for target, needed in zip(setup.targets, setup.needs, strict=True):
        for number in needed:
            contenders[number].require(target)
    directories = [Path(one) for one in setup.scratch if not is_s3(one)]
    if directories and setup.number:  # the run removes what a killed rank leaves there
        tempfile.tempdir = str(directories[0])
    files = _files(setup, setup.rank)
    sizes = tuple(map(size_of, files))
    if sizes != setup.sizes:
        raise UsageError(
            f"workload {setup.workload}: rank {setup.rank} has {sizes} bytes here and "
            f"{setup.sizes} bytes for rank 0; give all nodes the same file"
        )
    job = Job(
        contenders=tuple(contenders),
        files=files,
        pool_bytes=setup.pool_bytes,
        seed=setup.seed,
        number=setup.number,
        source=setup.source,
        source_files=() if setup.source is None else _files(setup, setup.source_rank),
        nodes=setup.nodes,
        machine=LocalTargets(setup.scratch, counts=setup.counts, away=setup.away)
        if setup.number and setup.nodes_apart
        else None,
        replica=setup.replicas,
    )
    job.warm_up(setup.warm_ups)
    return job


def _files(setup: Setup, rank: int) -> tuple[tuple[FileSpec, ...], ...]:
    workload = load_workload(setup.workload)
    if setup.limit is not None:
        workload = workload.scaled(*setup.limit)
    files = workload.files(rank)
    return tuple(shape.apply(files) for shape in setup.shapes)


def _check_memory(setup: Setup) -> None:
    """Raise UsageError where the ranks' data do not fit: rank 0 saw the memory of its own node."""
    needed, available = setup.pool_bytes * setup.local, available_bytes()
    if available is not None and needed > available:
        raise UsageError(
            f"the data of {count_of(setup.local, 'rank')} take {format_size(needed)} of memory, "
            f"and {format_size(available)} are available on this node; choose a smaller --size"
        )


def _check_shared(setup: Setup) -> None:
    for target, scratch in zip(setup.targets, setup.scratch, strict=True):
        if is_s3(scratch):
            continue
        try:
            found = (Path(scratch) / _TOKEN).read_text()
        except OSError as error:
            raise TargetError(
                f"--target {target}: this node does not see the directory of the run that rank 0 "
                f"made there ({error.strerror}); choose a directory that all nodes share"
            ) from error
        if found != setup.token:
            raise TargetError(
                f"--target {target}: is another directory on this node than on that of rank 0; "
                "choose a directory that all nodes share"
            )
