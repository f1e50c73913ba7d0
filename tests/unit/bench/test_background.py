"""Background: another process restores an earlier checkpoint during every save and restore."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from iobench import workloads
from iobench.bench.axes import Axes
from iobench.bench.background import Background, during
from iobench.bench.choose import choose
from iobench.bench.judging.repeat import Repeat
from iobench.bench.plan import Plan
from iobench.bench.processes.job import CheckpointRef, Job, Looped
from iobench.bench.targets.base import OpenTarget, Scratch
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import JobError
from iobench.results.records import BackgroundRestores

from .conftest import tiny_file

SPANS = ((9.0, 11.0), (11.5, 13.5), (14.0, 18.0))


def looped(spans: tuple[tuple[float, float], ...] = SPANS) -> Looped:
    return Looped(
        spans=spans, size_bytes=1000, read_bytes=2700, resident_fraction=0.0, mismatches=0
    )


def restored(began_s: float, elapsed_s: float, ended: Looped | JobError) -> BackgroundRestores:
    return during("odirect", [ended], began_s, elapsed_s)


def test_restores_that_the_clock_cuts_count_by_their_part() -> None:
    """Half of the first one, all of the second, a quarter of the third."""
    found = restored(10.0, 5.0, looped())
    assert (found.restores, found.bytes) == (3, 1750)
    assert (found.lead_s, found.lag_s, found.reading_s) == (1.0, 3.0, 4.0)
    assert found.from_storage == 0.9
    assert restored(10.0, 1.0, looped()).restores == 1


def test_a_clock_without_restores_at_its_ends() -> None:
    found = restored(8.0, 12.0, looped())
    assert (found.lead_s, found.lag_s, found.bytes) == (-1.0, -2.0, 3000)
    failed = restored(8.0, 12.0, JobError("it was ended by SIGKILL"))
    assert (failed.bytes, failed.error) == (0, "it was ended by SIGKILL")


class Restoring:
    """A job whose restores end at 1 s, 2 s, and so on."""

    def __init__(self) -> None:
        self.count = 0

    def scrub(self, _shape: int, _tp: None) -> None:
        pass

    def restore(self, _ref: CheckpointRef) -> Any:
        self.count += 1
        return SimpleNamespace(transfer=SimpleNamespace(bytes=10), at_s=float(self.count))

    def verify(self, _ref: CheckpointRef) -> Any:
        return SimpleNamespace(mismatches=0)


@pytest.mark.parametrize(("until_s", "restores"), [(1.5, 2), (2.5, 3)])
def test_the_last_restore_ends_after_the_operation(until_s: float, restores: int) -> None:
    """Also where the job was not running when it was ended, between two restores: it is known
    after the second one."""
    begun, ended_s = list[None](), iter([None, until_s])
    ref = CheckpointRef(contender=0, shape=0, directory="s3://bucket/prefix")
    found = Job._restore_until(
        cast(Job, Restoring()), ref, lambda: begun.append(None), lambda: next(ended_s)
    )
    assert [end for _, end in found.spans] == [float(number + 1) for number in range(restores)]
    assert (len(begun), found.size_bytes, found.read_bytes) == (1, 10, None)


@pytest.fixture
def background(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, idle: object
) -> Iterator[Background]:
    path = tiny_file(tmp_path_factory)
    tiny = workloads.load(path)
    contenders, _ = choose("odirect,buffered,peer:torch-save", tmp_path)
    plan = Plan(
        workload=tiny,
        full_bytes=tiny.size_bytes(),
        rank=0,
        contenders=tuple(contenders),
        targets=(DirectoryTarget(path=tmp_path),),
        repeat=Repeat(times=1),
        ceiling=False,
        seed=1,
        axes=Axes.parse(background="restore", serializer="safetensors,torch"),
        given=str(path),
    )
    scratch = Scratch(location=str(tmp_path))
    with Background(plan, None, OpenTarget(scratch=scratch, monitor=idle)) as made:
        yield made


def pid_of(background: Background) -> int:
    (child,) = background._ranks._children
    return child.pid


@pytest.mark.slow
def test_it_restores_all_the_time_and_verifies(background: Background, tmp_path: Path) -> None:
    """Each shape has a checkpoint of its own; a peer's reader is `buffered`."""
    for contender, shape, writer in ((0, 0, "odirect"), (1, 1, "buffered"), (2, 0, "buffered")):
        with background.restoring(contender, shape) as restores:
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + 0.05:
                pass
            elapsed_s = time.perf_counter() - began_s
        found = restores(began_s, elapsed_s)
        assert (found.writer, found.error, found.mismatches) == (writer, "", 0)
        assert found.lead_s >= 0
        assert found.lag_s >= 0
        assert found.restores >= 1
        assert found.bytes > 0
    assert sorted(os.listdir(tmp_path)) == ["earlier-0", "earlier-1"]


@pytest.mark.slow
def test_a_process_that_ends_early_is_reported_and_replaced(
    background: Background, tmp_path: Path
) -> None:
    """The operation goes on. The next one has a new process, with a checkpoint that it verifies."""
    with background.restoring(0, 0) as restores:
        os.kill(pid_of(background), signal.SIGKILL)
    assert "was ended by SIGKILL" in restores(0.0, 1.0).error
    with background.restoring(0, 0) as restores:
        for path in (tmp_path / "earlier-0").rglob("*"):
            path.is_file() and path.unlink()
    assert "No such file" in restores(0.0, 1.0).error
    with background.restoring(0, 0) as restores:
        pass
    assert (restores(0.0, 1.0).mismatches, restores(0.0, 1.0).error) == (0, "")


@pytest.mark.slow
def test_an_interrupted_operation_ends_it(background: Background) -> None:
    pids = []

    def interrupted() -> None:
        with background.restoring(0, 0):
            pids.append(pid_of(background))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert background._ranks._children == []
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
