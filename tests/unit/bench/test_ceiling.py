"""The turn of a fio job: its records, and the removal of its file at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.bench import fio
from iobench.bench.ceiling import CeilingJobs
from iobench.bench.fio import JOBS, FioJob, FioSample
from iobench.errors import CeilingError
from iobench.results import CeilingSample, Operation

_Fails = Callable[[str], None]


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[_Fails], list[object]]:
    """Run a whole turn of the first job. Return the calls of `settled` and the records. fio's file
    appears with its first operation and stays; `fails` may raise."""

    def take(fails: _Fails) -> list[object]:
        def run_job(
            job: FioJob, operation: Operation, directory: Path, size_bytes: int, *, fallocate: bool
        ) -> FioSample:
            assert (directory, fallocate) == (tmp_path, True)
            (directory / fio.FILE_NAME).touch()
            fails(operation)
            return FioSample(bytes=size_bytes, elapsed_s=2.0, cpu_s=0.5)

        monkeypatch.setattr(fio, "run_job", run_job)
        ceiling = CeilingJobs(run_id="0" * 16, directory=tmp_path, size_bytes=4096, fallocate=True)
        seen: list[object] = []

        def settled(*arguments: object) -> None:
            seen.append(arguments)

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
    """Each follows its `settled`, at the repetition and position of the turn."""
    seen = turn(lambda _: None)
    assert _short(seen) == [
        (f"fio {JOBS[0].name} save", 3),
        ("save", 4096, 2.0, 0.5, None),
        (f"fio {JOBS[0].name} restore", 3),
        ("restore", 4096, 2.0, 0.5, None),
        list(JOBS),
    ]
    record = seen[1]
    assert isinstance(record, CeilingSample)
    assert (record.repetition, record.order, record.job) == (3, 7, JOBS[0].describe())


@pytest.mark.parametrize("failing", ["save", "restore"])
def test_a_job_that_fails(turn: Callable[[_Fails], list[object]], failing: str) -> None:
    """It is recorded with its error, its file is removed, and it does not remain."""

    def fails(operation: str) -> None:
        if operation == failing:
            raise CeilingError("no io_uring here")

    *_, record, able = _short(turn(fails))
    assert record == (failing, 0, 0.0, None, "no io_uring here")
    assert able == list(JOBS[1:])


def test_an_interrupt(turn: Callable[[_Fails], list[object]]) -> None:
    """It leaves no file either."""

    def fails(_operation: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turn(fails)
