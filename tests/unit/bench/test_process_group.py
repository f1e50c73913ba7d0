"""ProcessGroup: real processes that answer together; none outlives a failure or the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from iobench.bench.contenders.base import WriterContender
from iobench.bench.processes.group import ProcessGroup
from iobench.bench.processes.job import Job, JobSetup
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
def test_a_process_that_is_killed(group: ProcessGroup) -> None:
    group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
    processes(group)[1].kill()
    with pytest.raises(JobError, match="process 2 of 2 was ended by SIGKILL"):
        group.ask(2, partial(Job.prepare, shape=0, checkpoint=(0, 0)))
