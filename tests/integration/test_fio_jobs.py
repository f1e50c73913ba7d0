"""The ceiling's jobs through the real fio, on a few MiB."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from iobench.bench import fio
from iobench.bench.fio import FILE_NAME, JOBS, FioJob, FioSample, cleanup, started
from iobench.environment import probe_directory
from iobench.environment.machine import fio_version
from iobench.errors import FioError
from iobench.units import MIB

pytestmark = pytest.mark.skipif(fio_version() is None, reason="fio is not installed")


def run_job(*asked: Any) -> FioSample:
    """Run one job, without a wait before its clock."""
    with started(*asked) as measure:
        return measure()


def _skip_without_direct_io(directory: Path) -> None:
    if not next(probe.ok for probe in probe_directory(directory) if probe.name == "O_DIRECT"):
        pytest.skip("no direct I/O on the file system of the tests")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_saved_and_restored_bytes(tmp_path, job) -> None:
    """Each job moves whole blocks both ways, in a directory whose name fio could misread."""
    _skip_without_direct_io(tmp_path)
    place = tmp_path / "with: colon, blank"
    place.mkdir()
    size = job.block_size + 4096
    try:
        saved = run_job(job, "save", place, size)
    except FioError as error:
        if job.ioengine == "io_uring" and "not permitted" in str(error):
            pytest.skip(f"io_uring is refused here: {error}")
        raise
    assert (place / FILE_NAME).stat().st_size == saved.bytes == job.block_size
    restored = run_job(job, "restore", place, size)
    assert restored.bytes == saved.bytes
    assert min(saved.elapsed_s, restored.elapsed_s) > 0
    cleanup(place)
    assert list(place.iterdir()) == []


def test_a_job_waits_before_its_clock(tmp_path, monkeypatch) -> None:
    """fio starts and makes its file, writes when `measure` is called, and leaves no other file.

    Its buffers are in huge pages; tunables of the user stay.
    """
    _skip_without_direct_io(tmp_path)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    children: list[subprocess.Popen[str]] = []
    start = fio._start
    monkeypatch.setattr(fio, "_start", lambda *a: children.append(start(*a)) or children[0])
    job = FioJob(ioengine="psync", block_size=MIB, iodepth=1)
    with started(job, "save", tmp_path, 4 * MIB) as measure:
        process = Path(f"/proc/{children[0].pid}")
        while not any(path.read_text() for path in process.glob("task/*/children")):
            assert children[0].poll() is None, "fio waits for no command"
        # The C library parses them in place.
        tunables = (process / "environ").read_bytes()
        assert b"GLIBC_TUNABLES=glibc.malloc.check=0" in tunables
        assert b"glibc.malloc.hugetlb=1" in tunables
        assert (tmp_path / FILE_NAME).read_bytes() == bytes(4 * MIB)
        assert measure().bytes == 4 * MIB
    assert (tmp_path / FILE_NAME).read_bytes().count(0) < MIB
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_an_engine_that_fio_lacks(tmp_path) -> None:
    """The reason is fio's own, so that the other jobs can go on, and no file stays."""
    job = FioJob(ioengine="nosuch", block_size=MIB, iodepth=1)
    with pytest.raises(FioError, match="engine nosuch not loadable"):
        run_job(job, "save", tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []
