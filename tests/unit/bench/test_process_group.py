"""ProcessGroup: real processes that answer together; none outlives a failure or the end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from iobench.bench.contenders.base import WriterContender
from iobench.bench.processes.group import ProcessGroup
from iobench.bench.processes.job import CheckpointRef, Job, JobSetup
from iobench.errors import JobError
from iobench.units import MIB
from iobench.workloads import Workload
from iobench.writers.registry import make

from .conftest import tiny_workload


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return tiny_workload(tmp_path_factory)


@pytest.fixture(scope="module")
def group(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    """Two processes after a warm-up."""
    first = JobSetup(
        contenders=(WriterContender(make("buffered", threads="2")),),
        files=(tuple(workload.files()),),
        pool_bytes=MIB,
        seed=1,
        number=0,
    )
    where = tmp_path_factory.mktemp("warm-up")
    setups = [first, replace(first, number=1, seed=2)]
    with ProcessGroup(setups, partial(Job.warm_up, directories=[where])) as made:
        yield made


def processes(group: ProcessGroup) -> list[subprocess.Popen[bytes]]:
    return [member._process for member in group._members]


@pytest.mark.slow
def test_each_saves_and_restores_files_of_its_own(
    group: ProcessGroup, workload: Workload, tmp_path: Path
) -> None:
    """With the same options, in directories of their own, with different bytes, and their own
    usage."""
    ref = CheckpointRef(contender=0, shape=0, directory=tmp_path)
    group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    saved = group.ask(2, partial(Job.save, ref=ref))
    sizes = group.ask(2, partial(Job.sizes, shape=0, subsets=(None, 0.3)))
    assert [one.transfer.bytes for one in saved] == [one.saved for one in sizes]
    assert [sum(one.file_bytes) for one in saved] == [one.saved for one in sizes]
    assert all(one.usage.io.get("wchar", sizes[0].saved) >= sizes[0].saved for one in saved)
    names = [
        {p.relative_to(tmp_path / f"job-{i}") for p in tmp_path.glob(f"job-{i}/**/*")}
        for i in (0, 1)
    ]
    assert names[0] == names[1] != set()
    path = max((file for file in workload.files()), key=lambda file: file.size_bytes).path
    assert (tmp_path / "job-0" / path).read_bytes() != (tmp_path / "job-1" / path).read_bytes()
    for subset in (None, 0.3):
        group.ask(2, partial(Job.scrub, shape=0, subset=subset))
        restored = group.ask(2, partial(Job.restore, ref=ref))
        assert [one.transfer.bytes for one in restored] == [
            one.restored[subset is not None] for one in sizes
        ]
        assert [one.mismatches for one in group.ask(2, partial(Job.verify, ref=ref))] == [0, 0]
    assert group.ask(2, attrgetter("contenders"))[1][0].label == "buffered,threads=2"


def test_a_wrong_byte_of_one_process_is_found(group: ProcessGroup, tmp_path: Path) -> None:
    ref = CheckpointRef(contender=0, shape=0, directory=tmp_path)
    group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    group.ask(2, partial(Job.save, ref=ref))
    (path,) = (tmp_path / "job-1").rglob("model.safetensors")  # ends with a tensor
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    group.ask(2, partial(Job.scrub, shape=0, subset=None))
    group.ask(2, partial(Job.restore, ref=ref))
    assert [one.mismatches for one in group.ask(2, partial(Job.verify, ref=ref))] == [0, 1]


@pytest.mark.slow
def test_the_error_of_one_process_ends_all(group: ProcessGroup) -> None:
    """The error names the process and the cause. The next command starts new processes."""
    group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    before = processes(group)
    with pytest.raises(JobError, match=r"process [12] of 2: AttributeError: .* 'nothing'"):
        group.ask(2, attrgetter("nothing"))
    assert [one.returncode for one in before] == [-signal.SIGKILL] * 2
    assert group._members == []
    assert len(group.ask(2, attrgetter("contenders"))) == 2
    assert {one.pid for one in processes(group)}.isdisjoint({one.pid for one in before})


@pytest.mark.slow
def test_a_process_that_is_killed(group: ProcessGroup) -> None:
    group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    processes(group)[1].kill()
    with pytest.raises(JobError, match="process 2 of 2 was ended by SIGKILL"):
        group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))


@pytest.mark.slow
def test_none_is_left(group: ProcessGroup) -> None:
    """At the end of the block all processes have ended. A later command starts new ones."""
    group.ask(1, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    before = processes(group)
    group.__exit__(None, None, None)
    assert all(one.poll() is not None for one in before)
