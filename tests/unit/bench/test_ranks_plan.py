"""The plan of a run over ranks: whose files, how much memory and space, what is scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from iobench.bench.axes import Axes
from iobench.bench.contenders.base import WriterContender
from iobench.bench.data.sliced_files import Sliced
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.verdict import Context
from iobench.bench.plan import Plan
from iobench.bench.planning import plan_lines
from iobench.bench.processes.job import CheckpointSizes, Job, Release
from iobench.bench.ranks.group import Executor
from iobench.bench.ranks.setup import make_job
from iobench.bench.runner import header
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import UsageError
from iobench.units import MIB, format_size
from iobench.workloads import load
from iobench.workloads.specs import size_of
from iobench.writers.registry import make

from .conftest import local_setup, world_facts


class _Sizes(Executor):
    """Ranks that all have the same sizes."""

    def ask(self, count: int, what: object, release: Release | None = None) -> list[object]:  # type: ignore[override]  # one reply is enough here
        return [CheckpointSizes(saved=100, restored=(100,))] * count


def _plan(name: str, ranks: int, local: int, target: Path) -> Plan:
    workload = load(name).scaled(64 * MIB)
    return Plan(
        workload=workload,
        full_bytes=load(name).size_bytes(0),
        rank=0,
        contenders=(WriterContender(make("buffered")),),
        targets=(DirectoryTarget(path=target),),
        repeat=Repeat(times=1),
        ceiling=False,
        seed=1,
        axes=Axes(numjobs=(ranks,)),
        given=name,
        world=world_facts(ranks, local),
    )


def test_each_rank_has_the_files_of_its_rank(tmp_path: Path) -> None:
    """Also where they differ much: rank 0 of the HF trainer writes nearly everything."""
    plan = _plan("llama7b", 4, 2, tmp_path)
    assert plan.ranks == (0, 1, 2, 3)
    sizes = [size_of(shapes[0]) for shapes in plan.files_of_jobs]
    assert sizes[1] < sizes[0] / 1000
    assert plan.all_bytes == sum(sizes)
    assert plan.written_bytes == sum(sizes)
    assert plan.part == "4 of 8 ranks"


@pytest.mark.parametrize("ranks", [8, 11])
def test_more_ranks_than_the_workload_has(ranks: int, tmp_path: Path) -> None:
    """They begin again with rank 0; nothing is scaled by that."""
    plan = _plan("llama7b-zero3", ranks, ranks, tmp_path)
    assert plan.ranks == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2)[:ranks]
    assert plan.part is None
    lines = [line for line in plan_lines(plan) if line.startswith("ranks ")]
    assert lines[0].startswith(f"ranks     {ranks}: the files of rank 0 to 7 of 8, each its own")
    assert ("from rank 8 on, copies" in lines[0]) == (ranks > 8)


def test_fewer_ranks_are_a_scaled_workload(tmp_path: Path) -> None:
    """In the plan's lines, in the record, and so in every verdict."""
    plan = _plan("llama7b-zero3", 2, 1, tmp_path)
    assert "scaled    2 of 8 ranks: the others' files are not saved" in list(plan_lines(plan))
    run = header(plan, _Sizes())
    assert run.workload.scale is not None
    assert run.workload.scale.endswith(", 2 of 8 ranks")
    assert Context.of(run).scale == run.workload.scale


def test_a_node_with_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' data must fit there too, and the limits of its control groups count."""
    plan = _plan("llama7b-zero3", 2, 2, tmp_path)
    setup = local_setup(plan, tmp_path)
    assert setup.pool_bytes == plan.pool_bytes // 2  # two ranks on a node
    needed = 2 * setup.pool_bytes
    monkeypatch.setattr("iobench.bench.ranks.setup.available_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match=f"data of 2 ranks take {format_size(needed)} of memory"):
        make_job(setup, 1)


@pytest.mark.parametrize("sliced", [True, False])
def test_ranks_have_bytes_of_their_own_unless_they_save_slices(
    sliced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)  # a rank changes it
    plan = _plan("llama7b-zero3", 2, 2, tmp_path)
    setup = replace(local_setup(plan, tmp_path), sliced=sliced)
    jobs = [make_job(setup, rank) for rank in (0, 1)]
    for job in jobs:
        job.prepare(0, (0, 0), Sliced(how="all", jobs=2) if sliced else None)
    assert np.array_equal(*(job._pool.memory[:4096] for job in jobs)) == sliced


def test_the_same_limit_gives_the_same_files() -> None:
    """Every rank scales the workload itself, by the limit that rank 0 sends."""
    workload = load("llama7b-zero3").scaled(50 * MIB)
    assert workload.scale is not None
    again = load("llama7b-zero3").scaled(workload.scale.limit_bytes, 0)
    assert again.files(3) == workload.files(3)


def test_a_job_without_files_moves_nothing(tmp_path: Path) -> None:
    """Some ranks of a workload write no file; they take part with 0 bytes."""
    from iobench.bench.processes.job import CheckpointRef

    job = Job(
        contenders=(WriterContender(make("buffered")),),
        files=((),),
        pool_bytes=16 * MIB,
        seed=1,
        number=1,
    )
    ref = CheckpointRef(contender=0, shape=0, directory=tmp_path / "step")
    assert job.sizes(0, (None, 2)) == CheckpointSizes(saved=0, restored=(0, 0))
    job.prepare(0, (0, 0))
    save = job.save(ref)
    job.scrub(0, None)
    restore = job.restore(ref)
    assert (save.transfer.bytes, restore.transfer.bytes) == (0, 0)
    assert job.verify(ref).tensors == 0
    assert not (tmp_path / "step").exists()
