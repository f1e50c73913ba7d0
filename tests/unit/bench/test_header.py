"""The sizes of samples in the header of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from iobench.bench.axes import Axes
from iobench.bench.contenders.base import WriterContender
from iobench.bench.judging.repeat import Repeat
from iobench.bench.plan import Plan
from iobench.bench.processes.job import Job
from iobench.bench.ranks.group import Executor
from iobench.bench.runner import header
from iobench.bench.targets import directory
from iobench.bench.targets.directory import DirectoryTarget
from iobench.environment import Machine, Storage
from iobench.results import Run
from iobench.units import MIB
from iobench.workloads import FileSpec, Workload
from iobench.writers.registry import make

T = TypeVar("T")


class Members(Executor):
    """Several jobs in this process."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.jobs = [
            Job(contenders=plan.contenders, files=files, pool_bytes=16 * MIB, seed=1)
            for files in plan.files_of_jobs
        ]

    def ask(self, count: int, what: Callable[[Job], T]) -> list[T]:
        return [what(job) for job in self.jobs[:count]]


@pytest.fixture
def header_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """The header of a run of two writers; `full_bytes` of its plan is an estimate."""
    monkeypatch.setattr(directory, "describe_machine", Machine)
    monkeypatch.setattr(directory, "describe_storage", lambda _path: Storage())

    def write(workload: Workload, *, full_bytes: int = 12345, **axes: str) -> Run:
        plan = Plan(
            workload=workload,
            full_bytes=full_bytes,
            rank=0,
            contenders=(WriterContender(make("buffered")), WriterContender(make("uncached"))),
            targets=(DirectoryTarget(path=tmp_path),),
            repeat=Repeat(times=1),
            ceiling=False,
            seed=1,
            axes=Axes.parse(**axes),
        )
        return header(plan, Members(plan))

    return write


def test_the_bytes_of_full_size(header_of: Callable[..., Run], tiny: Workload) -> None:
    """A scaled workload takes them from the plan; otherwise they are the measured bytes, as the
    plan's are an estimate."""
    whole = header_of(tiny).workload
    assert whole.full_bytes == whole.bytes > 12345
    assert (whole.scaled, whole.scale) == (False, None)
    scaled = header_of(tiny.scaled(tiny.size_bytes() // 2, 0), full_bytes=tiny.size_bytes())
    assert scaled.workload.scaled
    assert scaled.workload.full_bytes == tiny.size_bytes() > scaled.workload.bytes


def test_of_many_files_the_first_are_listed(
    header_of: Callable[..., Run], tiny: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is one line, which a reader limits; the number of files and the hash are of all."""
    computed, files = [], type(tiny).files

    def counted(workload: Workload, rank: int = 0) -> tuple[FileSpec, ...]:
        computed.append(rank)
        return files(workload, rank)

    monkeypatch.setattr(type(tiny), "files", counted)
    whole = header_of(tiny, granularity="tensor")
    assert computed == [0]  # once, though a plan needs them in several places
    monkeypatch.setattr("iobench.bench.runner._LISTED", 2)
    short = header_of(tiny, granularity="tensor")
    assert short.plan["files"] == whole.plan["files"][:2] != whole.plan["files"]
    assert (short.workload.files, short.config_hash) == (whole.workload.files, whole.config_hash)


def test_where_all_samples_move_the_same_the_header_says_it(
    header_of: Callable[..., Run], tiny: Workload
) -> None:
    """The restored part is listed too, if there is one such part only."""
    assert header_of(tiny).variants == ()
    assert header_of(tiny).workload.restored_bytes is None
    partly = header_of(tiny, restore_as="tp=2")
    assert partly.variants == ()
    assert partly.workload.restored_bytes is not None
    assert 0 < partly.workload.restored_bytes < partly.workload.bytes


def test_differences_are_listed_once(header_of: Callable[..., Run], tiny: Workload) -> None:
    """By shape, processes and part. Two writers move the same bytes, two ranks about twice as
    many."""
    axes = {"granularity": "same,blob", "restore_as": "same,tp=2"}
    run = header_of(tiny, numjobs="1,2", serializer="safetensors", **axes)
    facts = {
        (one.axes.granularity, one.axes.numjobs, one.operation, one.axes.restore_as): one
        for one in run.variants
    }
    assert len(run.variants) == len(facts) == 2 * 2 * 3
    for shape in (None, "blob"):
        saved, restored, half = (
            (facts[shape, 1, *which], facts[shape, 2, *which])
            for which in (("save", None), ("restore", None), ("restore", "tp=2"))
        )
        for one, two in (saved, restored, half):
            assert two.files == 2 * one.files
            assert 1.9 * one.bytes < two.bytes < 2.1 * one.bytes  # ranks write almost the same
        assert [one.bytes for one in saved] == [one.bytes for one in restored]
        assert 0 < half[0].bytes < saved[0].bytes
    assert facts[None, 1, "save", None].bytes == run.workload.bytes
    assert facts["blob", 1, "save", None].files == 1
