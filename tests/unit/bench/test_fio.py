"""The jobs of the ceiling, and the parser of fio's output. fio itself is not run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from iobench.bench import fio
from iobench.bench.fio import FILE_NAME, FioJob, FioSample, Operation, parse_output, started
from iobench.errors import FioError
from iobench.units import MIB

JOB = FioJob(ioengine="libaio", block_size=MIB, iodepth=32)


def run_job(*asked: Any) -> FioSample:
    """Run one job, without a wait before its clock."""
    with started(*asked) as measure:
        return measure()


def document(
    moved: int = 4 * MIB, runtime: int = 250, error: int = 0, rw: str = "write", **job: Any
) -> str:
    """JSON in the form of fio 3.33, with the fields that are read."""
    record = {
        "jobname": "ceiling",
        "error": error,
        "job_runtime": 500,
        "usr_cpu": 10.0,
        "sys_cpu": 30.0,
        "read": {"io_bytes": 0, "runtime": 0},
        "write": {"io_bytes": 0, "runtime": 0},
        rw: {"io_bytes": moved, "runtime": runtime},
    } | job
    return json.dumps({"fio version": "fio-3.33", "jobs": [record]}, indent=2)


def parse(output: str, status: int = 0, errors: str = "", op: Operation = "save") -> FioSample:
    return parse_output(JOB, op, 4 * MIB, status, output, errors)


def test_figures_of_a_save() -> None:
    """Bytes, seconds and CPU seconds come from the write side of the job."""
    sample = parse(document())
    assert (sample.bytes, sample.elapsed_s) == (4 * MIB, 0.25)
    assert sample.cpu_s == pytest.approx(0.2)


def test_notes_around_the_document() -> None:
    """Lines that fio prints before and after its JSON are ignored."""
    assert parse("fio: this platform is odd {x}\n" + document() + "\nbye\n").bytes == 4 * MIB


def test_a_run_below_a_millisecond_is_one() -> None:
    """A duration of zero milliseconds never gives an infinite rate."""
    assert parse(document(runtime=0)).elapsed_s == 0.001


@pytest.mark.parametrize(
    ("output", "status", "errors", "word"),
    [
        ("", 1, "fio: engine nosuch not loadable\n", "engine nosuch not loadable"),
        ("", -9, "", "killed by SIGKILL"),
        ("", 3, "", "exit status 3"),
        ("not json\n", 0, "", "not json"),
        ("{\n  broken", 1, "fio: no\n", "no"),
        (document(error=28), 1, "", "No space left on device"),
        (document(), 0, "fio: end_fsync failed for file f\n", "end_fsync failed"),
        (document(moved=MIB), 0, "", f"moved {MIB} of {4 * MIB} bytes"),
        (document(jobname="x") + "", 1, "fio: file creation disallowed\n", "disallowed"),
        ('{\n"jobs": []}', 0, "", "exit status 0"),
        (  # the line that fio prints before its JSON, with the errno
            "fio: func=io_queue_init, error=Operation not permitted\n" + document(error=1),
            1,
            "",
            "io_queue_init, error=Operation not permitted",
        ),
        ("ceiling : Saving output of prerun in ceiling.prerun.txt\n", 1, "", "exit status 1"),
    ],
)
def test_failures_keep_fios_words(output: str, status: int, errors: str, word: str) -> None:
    """Every failure is a FioError with the name of the job and fio's message."""
    with pytest.raises(FioError, match="libaio 1MiB x 32 save") as caught:
        parse(output, status, errors)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (0, 0),
        (4095, 0),
        (4097, 4096),
        (MIB - 1, MIB - 4096),
        (MIB, MIB),
        (5 * MIB + 4096, 5 * MIB),
    ],
)
def test_sizes_are_rounded_down(size: int, rounded: int) -> None:
    """To whole blocks, or below one block to whole pages: the bytes that fio really writes."""
    assert JOB.size_for(size) == rounded


def test_options_are_plain_and_honest() -> None:
    """Direct, preallocated, synced at the end, in one process; numbers are integers."""
    save = JOB.options("save", 4 * MIB)
    assert save["end_fsync"] == save["direct"] == save["thread"] == save["refill_buffers"] == 1
    assert (save["bs"], save["size"], save["fallocate"]) == (MIB, 4 * MIB, "native")
    assert JOB.options("save", 4 * MIB, fallocate=False)["fallocate"] == "none"
    restore = JOB.options("restore", 4 * MIB)
    assert (restore["rw"], restore["allow_file_create"]) == ("read", 0)
    assert "end_fsync" not in restore
    assert JOB.options("save", 8192)["bs"] == 8192


class _Ended:
    """A process of fio that ends at once with this output."""

    returncode = 0

    def __init__(self, output: str) -> None:
        self.output = output

    def communicate(self, *_: object, **__: object) -> tuple[str, str]:
        return self.output, ""

    def terminate(self) -> None:
        pass


def fake_fio(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    """Return `result` in place of fio, after fio's file has been made."""

    def start(options: dict[str, Any], directory: Path) -> _Ended:
        (directory / FILE_NAME).write_bytes(bytes(int(options["size"])))
        if isinstance(result, BaseException):
            raise result
        return _Ended(document(moved=int(options["size"])))

    monkeypatch.setattr(fio, "_start", start)


def test_a_save_writes_a_new_file_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old file is removed first. The new one stays until cleanup, which may be called twice."""
    (tmp_path / FILE_NAME).write_text("old")
    fake_fio(monkeypatch, None)
    assert run_job(JOB, "save", tmp_path, 2 * MIB + 5).bytes == 2 * MIB
    assert (tmp_path / FILE_NAME).stat().st_size == 2 * MIB
    fio.cleanup(tmp_path)
    fio.cleanup(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [FioError("no"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The incomplete file is removed after a failure and after Ctrl-C."""
    fake_fio(monkeypatch, error)
    with pytest.raises(type(error)):
        run_job(JOB, "save", tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_restore_needs_a_file(tmp_path: Path) -> None:
    """A restore without an earlier save fails, and makes no file."""
    with pytest.raises(FioError, match="a save job must come first"):
        run_job(JOB, "restore", tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_restore_reads_no_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fio would write missing bytes first, so a restore reads whole blocks of the file only."""
    (tmp_path / FILE_NAME).write_bytes(bytes(2 * MIB + 8192))
    sizes = []

    def start(options: dict[str, Any], *_: object) -> _Ended:
        sizes.append(options["size"])
        return _Ended(document(moved=2 * MIB, rw="read"))

    monkeypatch.setattr(fio, "_start", start)
    assert run_job(JOB, "restore", tmp_path, 64 * MIB).bytes == 2 * MIB
    assert sizes == [2 * MIB]


def test_what_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    """A save that exceeds the free space is refused before fio fills the disk."""
    space = os.statvfs(tmp_path)
    with pytest.raises(FioError, match="free"):
        run_job(JOB, "save", tmp_path, 2 * space.f_blocks * space.f_frsize)


@pytest.fixture
def sleeping_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """A program in place of fio that sleeps. Returns the processes, as they are started."""
    program = tmp_path / "bin/fio"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec /bin/sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    children: list[subprocess.Popen[str]] = []
    start = subprocess.Popen.__init__

    def started(self: subprocess.Popen[str], *arguments: Any, **options: Any) -> None:
        children.append(self)
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    return children


def test_an_interrupted_fio_is_stopped_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping_fio: list[subprocess.Popen[str]]
) -> None:
    """On Ctrl-C the child is terminated, and has ended before the interrupt propagates."""
    calls = []
    communicate = subprocess.Popen.communicate

    def interrupted(self: subprocess.Popen[str], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return communicate(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job(JOB, "save", tmp_path, MIB)
    assert sleeping_fio[0].returncode == -15
    assert not (tmp_path / FILE_NAME).exists()


def test_a_job_that_never_begins_is_stopped(
    tmp_path: Path, sleeping_fio: list[subprocess.Popen[str]]
) -> None:
    """A wait for idle storage may fail or be interrupted while fio waits for it."""
    with pytest.raises(ZeroDivisionError), fio.started(JOB, "save", tmp_path, MIB):
        _ = 1 / 0
    assert sleeping_fio[0].returncode == -15
    assert not (tmp_path / FILE_NAME).exists()
