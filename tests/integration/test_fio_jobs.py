"""The ceiling's jobs through the real fio, on a few MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.bench.fio import FILE_NAME, JOBS, FioJob, cleanup, fio_version, run_job
from iobench.environment import probe_directory
from iobench.errors import CeilingError
from iobench.units import MIB

pytestmark = pytest.mark.skipif(fio_version() is None, reason="fio is not installed")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_saved_and_restored_bytes(tmp_path: Path, job: FioJob) -> None:
    """Each job moves whole blocks both ways, in a directory whose name fio could misread."""
    if not next(probe.ok for probe in probe_directory(tmp_path) if probe.name == "O_DIRECT"):
        pytest.skip("no direct I/O on the file system of the tests")
    place = tmp_path / "with: colon, blank"
    place.mkdir()
    size = job.block_size + 4096
    try:
        saved = run_job(job, "save", place, size)
    except CeilingError as error:
        if job.ioengine == "io_uring" and "not permitted" in str(error):
            pytest.skip(f"io_uring is refused here: {error}")
        raise
    assert (place / FILE_NAME).stat().st_size == saved.bytes == job.block_size
    restored = run_job(job, "restore", place, size)
    assert restored.bytes == saved.bytes
    assert min(saved.elapsed_s, restored.elapsed_s) > 0
    cleanup(place)
    assert list(place.iterdir()) == []


def test_an_engine_that_fio_lacks(tmp_path: Path) -> None:
    """The reason is fio's own, so that the other jobs can go on, and no file stays."""
    job = FioJob(ioengine="nosuch", block_size=MIB, iodepth=1)
    with pytest.raises(CeilingError, match="engine nosuch not loadable"):
        run_job(job, "save", tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []
