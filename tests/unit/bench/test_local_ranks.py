"""LocalRanks: real processes that answer together; none outlives a loss or the end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from iobench import workloads
from iobench.bench.axes import Axes
from iobench.bench.choose import choose
from iobench.bench.judging.repeat import Repeat
from iobench.bench.plan import Plan
from iobench.bench.processes.job import CheckpointRef, Job
from iobench.bench.ranks import start
from iobench.bench.ranks.group import Executor
from iobench.bench.ranks.start import LocalRanks
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import JobError

from .conftest import local_setup, tiny_file

PREPARE = partial(Job.prepare, shape=0, checkpoint=(0, 0))


class Group:
    """Two processes, of which one is this one."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        given = local_setup(plan, scratch)
        self.ranks = LocalRanks(2)
        self.jobs = Executor(None, self.ranks, lambda _: given)

    def child(self) -> subprocess.Popen[bytes]:
        (child,) = self.ranks._children
        return child

    def again(self) -> None:
        """Carry out a command that works."""
        assert self.jobs.ask(2, PREPARE) == [None, None]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    path = tiny_file(tmp_path_factory)
    workload = workloads.load(path)
    plan = Plan(
        workload=workload,
        full_bytes=workload.size_bytes(),
        rank=0,
        contenders=tuple(choose("buffered,threads=2")[0]),
        targets=(DirectoryTarget(path=path.parent),),
        repeat=Repeat(times=1),
        ceiling=False,
        seed=1,
        axes=Axes.parse(numjobs="1,2"),
        given=str(path),
    )
    made = Group(plan, tmp_path_factory.mktemp("scratch"))
    with ExitStack() as stack:
        stack.enter_context(made.ranks)
        stack.enter_context(made.jobs)
        yield made


@pytest.mark.slow
def test_the_clock_starts_when_all_are_ready(group: Group, tmp_path: Path) -> None:
    """At one moment for both, as with the ranks of a launcher. All times are of one clock."""
    began_s: list[float | None] = []
    group.jobs.ask(2, PREPARE)
    ref = CheckpointRef(contender=0, shape=0, directory=str(tmp_path))
    saved = group.jobs.ask(2, partial(Job.save, ref=ref), began_s.append)
    (moment_s,) = began_s
    assert moment_s is not None
    for one in saved:
        assert one.at_s >= moment_s + one.late_s + one.transfer.elapsed_s
        assert one.clock_error_s == 0.0


@pytest.mark.slow
def test_the_error_of_one_process_names_it(group: Group, tmp_path: Path) -> None:
    """With the cause. The same processes carry out the next command."""
    group.again()
    child = group.child()
    ref = CheckpointRef(contender=0, shape=0, directory=str(tmp_path))
    group.jobs.ask(2, partial(Job.save, ref=ref))
    (path,) = (tmp_path / "job-1").rglob("model.safetensors")
    path.unlink()
    group.jobs.ask(2, partial(Job.scrub, shape=0, tp=None))
    with pytest.raises(JobError, match=r"^process 2 of 2: \w+: .*No such file"):
        group.jobs.ask(2, partial(Job.restore, ref=ref))
    with pytest.raises(JobError, match=r"^process 1 of 2: IndexError: .* \(and 1 more\)"):
        group.jobs.ask(2, partial(Job.restore, ref=replace(ref, shape=7)))
    group.again()
    assert group.child() is child


@pytest.mark.slow
def test_a_process_that_is_killed(group: Group) -> None:
    """It is named at once, and the next command starts another one."""
    group.again()
    child = group.child()
    child.kill()
    with pytest.raises(JobError, match=r"^process 2 of 2 was ended by SIGKILL$"):
        group.jobs.ask(2, PREPARE)
    assert group.ranks._children == []
    group.again()
    assert group.child().pid != child.pid


@pytest.mark.slow
def test_a_process_that_is_stopped(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named when it was silent for the time that ranks have, and it is killed."""
    monkeypatch.setenv("IOBENCH_LOST_AFTER", "4s")
    group.again()
    group.child().kill()  # the next one has this time
    with pytest.raises(JobError, match="SIGKILL"):
        group.jobs.ask(2, PREPARE)
    group.again()
    child = group.child()
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(JobError, match=r"^process 2 of 2: rank 1 \(.*\) is silent for \d+ s"):
        group.jobs.ask(2, PREPARE)
    assert child.returncode == -signal.SIGKILL
    monkeypatch.undo()
    group.again()


@pytest.mark.slow
def test_a_process_that_does_not_start(
    group: Group, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is reported at once, not after the time that ranks have to connect."""
    group.again()
    group.child().kill()
    monkeypatch.setattr(start, "_PROGRAM", "iobench.nothing")
    for why in ("was ended by SIGKILL", "ended with exit code 1"):
        with pytest.raises(JobError, match=f"^process 2 of 2 {why}"):
            group.jobs.ask(2, PREPARE)
    assert "No module named iobench.nothing" in capfd.readouterr().err
    monkeypatch.undo()
    group.again()
