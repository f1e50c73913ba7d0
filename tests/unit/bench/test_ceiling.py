"""The turn of a fio job: its records, and the removal of its file at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from iobench.bench import fio
from iobench.bench.ceiling import CeilingJobs
from iobench.bench.fio import JOBS, FioJob, FioSample
from iobench.bench.judging.ceiling import find_ceiling
from iobench.bench.processes.job import Job
from iobench.bench.ranks.group import Executor
from iobench.errors import FioError
from iobench.results import CeilingSample, Operation

_Fails = Callable[[str], None]


def _jobs(directory: Path, size_bytes: int) -> CeilingJobs:
    return CeilingJobs(
        executor=Executor(cast(Job, None)),
        run_id="0" * 16,
        directory=directory,
        size_bytes=size_bytes,
        fallocate=True,
    )


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[_Fails], list[object]]:
    """Run a whole turn of the first job. Return the starts of fio, the calls of `settled`, and the
    records. fio's file appears with its first operation and stays; `fails` may raise."""

    def take(fails: _Fails) -> list[object]:
        seen: list[object] = []

        @contextmanager
        def started(
            job: FioJob,
            operation: Operation,
            directory: Path,
            size_bytes: int,
            *,
            fallocate: bool,
        ) -> Iterator[Callable[[], FioSample]]:
            assert (directory, fallocate) == (tmp_path, True)
            seen.append("starts")

            def measure() -> FioSample:
                (directory / fio.FILE_NAME).touch()
                fails(operation)
                return FioSample(bytes=size_bytes, elapsed_s=2.0, cpu_s=0.5)

            yield measure

        def settled(*arguments: object) -> None:
            seen.append(arguments)

        monkeypatch.setattr(fio, "started", started)
        ceiling = _jobs(tmp_path, 4096)
        try:
            for record in ceiling.records(3, 7, JOBS[0], settled):
                seen += [record]
        finally:
            assert list(tmp_path.iterdir()) == []
            seen.append(ceiling.remaining)
        return seen

    return take


def _short(seen: list[object]) -> list[object]:
    """The records, shortened to their differences."""
    return [
        (one.operation, one.bytes, one.elapsed_s, one.cpu_s, one.error)
        if isinstance(one, CeilingSample)
        else one
        for one in seen
    ]


def test_a_save_and_a_restore(turn: Callable[[_Fails], list[object]]) -> None:
    """fio starts, then the storage settles; its clock follows, at the position of the turn."""
    seen = turn(lambda _: None)
    assert _short(seen) == [
        "starts",
        (f"fio {JOBS[0].name} save", 3),
        ("save", 4096, 2.0, 0.5, None),
        "starts",
        (f"fio {JOBS[0].name} restore", 3),
        ("restore", 4096, 2.0, 0.5, None),
        list(JOBS),
    ]
    record = seen[2]
    assert isinstance(record, CeilingSample)
    assert (record.repetition, record.order, record.job) == (3, 7, JOBS[0].describe())


@pytest.mark.parametrize("failing", ["save", "restore"])
def test_a_job_that_fails(turn: Callable[[_Fails], list[object]], failing: str) -> None:
    """It is recorded with its error, its file is removed, and it does not remain."""

    def fails(operation: str) -> None:
        if operation == failing:
            raise FioError("no io_uring here")

    *_, record, able = _short(turn(fails))
    assert record == (failing, 0, 0.0, None, "no io_uring here")
    assert able == list(JOBS[1:])


def test_an_interrupt(turn: Callable[[_Fails], list[object]]) -> None:
    """It leaves no file either."""

    def fails(_operation: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turn(fails)


def _race(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    rates: Mapping[tuple[int, str], Sequence[float]],
    records: list[CeilingSample] | None = None,
) -> list[set[tuple[int, str]]]:
    """Run the jobs with these rates, by index and operation; 1.0 where there is none.

    Return the operations of each repetition. Append the samples to `records`.
    """
    done: list[set[tuple[int, str]]] = []

    def started(job: FioJob, operation: Operation, *_: object, **__: object) -> object:
        one = (JOBS.index(job), operation)
        done[-1].add(one)
        rate = rates.get(one, [1.0] * 9)[len(done) - 1]
        return nullcontext(lambda: FioSample(bytes=1000, elapsed_s=1000 / rate, cpu_s=0.1))

    monkeypatch.setattr(fio, "started", started)
    ceiling = _jobs(directory, 1000)
    for repetition in range(max(map(len, rates.values()))):
        done.append(set())
        for job in list(ceiling.remaining):
            found = list(ceiling.records(repetition, 0, job, lambda *_: None))
            if records is not None:
                records += found
    return done


def test_a_beaten_job_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third repetition on, a job does not repeat an operation in which it is beaten.

    A restore needs the file of its save. So a save is repeated while its restore is.
    """
    slow = {(1, "save"): [0.9] * 4, (1, "restore"): [0.9] * 4}
    slow |= {(2, "restore"): [0.9] * 4, (3, "save"): [0.9] * 4}
    everything = {(number, one) for number in range(4) for one in ("save", "restore")}
    rest = everything - {(1, "save"), (1, "restore"), (2, "restore")}
    assert _race(monkeypatch, tmp_path, slow) == [everything, everything, rest, rest]


@pytest.mark.parametrize("rates", [[0.96] * 4, [0.5, 1.0, 0.5, 0.5]], ids=["near", "once"])
def test_an_unclear_race_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    """A job stays that is less than 5% slower, or that was as fast once."""
    one = {(1, "save"): rates, (1, "restore"): rates}
    assert {len(done) for done in _race(monkeypatch, tmp_path, one)} == {8}


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (1, 0.97, 0.9, 0.7)], ids=["equal", "different"])
def test_the_ceiling_is_hardly_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: Sequence[float]
) -> None:
    """Of 100 runs whose rates scatter by 10%: the ceiling, compared with that of all samples."""
    random, ratios, left_out = np.random.default_rng(1), [], 0
    for _ in range(100):
        rates = np.array(speeds) * np.exp(0.1 * random.standard_normal((6, 4)))
        records: list[CeilingSample] = []
        both = {(job, one): rates[:, job] for job in range(4) for one in ("save", "restore")}
        _race(monkeypatch, tmp_path, both, records)
        best = find_ceiling(records).save_bytes_per_s
        assert best is not None
        ratios.append(best / np.median(rates, axis=0).max())
        left_out += 2 * rates.size - len(records)
    assert np.mean(ratios) > 0.998
    assert left_out > 100
