"""Setup: what a rank needs to replay its files, as plain values from rank 0."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from iobench.writers.local.new_file import write_text
from iobench.writers.s3_store.target import is_s3

_TOKEN = "token"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The set-up of all ranks. `workload` and `limit` give the same files in every process.

    `ranks` has the rank of the workload whose files each process saves, and `sizes` their bytes in
    each shape, as rank 0 computes them. `needs` has the contenders, by number, that take part in
    each target. `scratch` is the run's own space in each target, and `token` is the content of a
    file there: a rank that does not find it sees another directory.
    """

    workload: str
    limit: tuple[int, int] | None
    """The bytes to which the workload is scaled, and the rank that writes as much then."""
    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    writers: str
    targets: tuple[str, ...]
    needs: tuple[tuple[int, ...], ...]
    scratch: tuple[str, ...]
    warm_ups: tuple[str, ...]
    token: str
    pool_bytes: int
    """Of each process."""
    seed: int
    sliced: bool
    """Whether all save the same bytes, some in slices."""
    members: Members
    reads: bool = False
    """Whether it is for a process that restores in the background, and not for the run's jobs."""


def setup_of(
    plan: Plan,
    members: Members,
    scratch: Sequence[str],
    warm_ups: Sequence[str],
    token: str,
) -> Setup:
    """Return the set-up of the ranks of a run."""
    needs = [
        tuple(
            number
            for number, one in enumerate(plan.contenders)
            if any(v.contender is one and v.target == value for v in plan.variants)
        )
        for value in plan.axes.targets
    ]
    scale = plan.workload.scale
    return Setup(
        workload=plan.given,
        limit=None if scale is None else (scale.limit_bytes, plan.rank),
        ranks=plan.ranks,
        sizes=tuple(tuple(map(size_of, shapes)) for shapes in plan.files_of_jobs),
        shapes=plan.axes.shapes,
        writers=",".join(one.label for one in plan.contenders),
        targets=tuple(one.location for one in plan.targets),
        needs=tuple(needs),
        scratch=tuple(scratch),
        warm_ups=tuple(warm_ups),
        token=token,
        pool_bytes=max(plan.pool_bytes // members.facts.local, LEAST_POOL),
        seed=plan.seed,
        sliced=plan.axes.sliced,
        # Processes of the run itself each restore their own files.
        members=members.as_replicas() if plan.axes.replicas and plan.world else members,
    )


def reader_setup(plan: Plan, members: Members, writers: str, warm_up: str) -> Setup:
    """Return the set-up of a process that restores in the background.

    It restores into the memory of its pool, in place. Its data repeat after the pool's size.
    """
    return replace(
        setup_of(plan, members, (), (warm_up,), ""),
        writers=writers,
        targets=(),
        needs=(),
        pool_bytes=min(READER_POOL, plan.pool_bytes),
        seed=plan.seed + plan.axes.most_jobs,
        sliced=False,
        reads=True,
    )


def show_token(scratch: Sequence[str]) -> str:
    """Write a file into each directory by which other nodes recognise it; return its content."""
    token = secrets.token_hex(8)
    for one in scratch:
        if not is_s3(one):
            write_text(Path(one) / _TOKEN, token)
    return token


def make_job(setup: Setup, rank: int) -> Job:
    """Return the job of this rank after its first-use work.

    Raises TargetError where a target is not the directory that rank 0 uses, UnavailableError where
    a writer does not work here, and UsageError for a workload file that differs from rank 0's.
    """
    _check_shared(setup)
    _check_memory(setup)
    contenders, _ = choose(setup.writers, *setup.targets)
    for target, needed in zip(setup.targets, setup.needs, strict=True):
        for one in needed:
            contenders[one].require(target)
    directories = [Path(one) for one in setup.scratch if not is_s3(one)]
    if directories and rank:  # the run removes what a killed rank leaves there
        tempfile.tempdir = str(directories[0])
    members, own = setup.members, 0 if setup.reads else rank
    files = _files(setup, setup.ranks[own])
    sizes = tuple(map(size_of, files))
    if sizes != setup.sizes[own]:
        raise UsageError(
            f"workload {setup.workload}: rank {setup.ranks[own]} has {sizes} bytes here and "
            f"{setup.sizes[own]} bytes for rank 0; give all nodes the same file"
        )
    source = members.facts.restored_from[rank]
    machine = None
    if rank and members.facts.nodes > 1:
        away = members.machines[rank] != members.machines[0]
        machine = LocalTargets(setup.scratch, counts=rank in members.first_of_machine, away=away)
    job = Job(
        contenders=tuple(contenders),
        files=files,
        pool_bytes=setup.pool_bytes,
        seed=setup.seed if setup.sliced else setup.seed + own,
        number=None if setup.reads else rank,
        source=None if source == rank else source,
        source_files=() if source == rank else _files(setup, setup.ranks[source]),
        nodes=members.facts.node if setup.sliced else (),
        machine=machine,
        replica=members.replicas,
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
    local = 1 if setup.reads else setup.members.facts.local
    needed, available = setup.pool_bytes * local, available_bytes()
    if available is not None and needed > available:
        raise UsageError(
            f"the data of {count_of(local, 'rank')} take {format_size(needed)} of memory, "
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
