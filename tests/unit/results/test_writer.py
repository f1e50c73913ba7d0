"""A result file grows line by line, is never overwritten, and records how the run ended."""

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from iobench.errors import ResultFileError, TransferError
from iobench.results import (
    End,
    ResultFile,
    ResultWriter,
    check_new,
    config_hash,
    default_path,
    new_run_id,
    read,
    utc_now,
)


def fail_during_a_run(path: Path, example: ResultFile, error: BaseException) -> None:
    def run() -> None:
        with ResultWriter(path) as results:
            results.write(example.run)
            raise error

    with pytest.raises(type(error)):
        run()


def test_what_is_written_is_read(tmp_path: Path, example: ResultFile) -> None:
    path = tmp_path / "new" / "run.jsonl"
    assert example.end is not None
    with ResultWriter(path) as results:
        for record in (example.run, *example.samples, *example.ceiling, example.end):
            results.write(record)
    again = read(path)
    assert (again.run, again.samples, again.ceiling, again.end) == (
        example.run,
        example.samples,
        example.ceiling,
        example.end,
    )


def test_where_a_file_can_be_made_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing directories are allowed and not made; an existing file or directory is refused."""
    check_new(tmp_path / "new" / "below" / "run.jsonl")
    assert not any(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in ("", "link"):
        with pytest.raises(ResultFileError, match="exists and is not overwritten"):
            check_new(tmp_path / taken)
    (tmp_path / "file").touch()
    with pytest.raises(ResultFileError, match="file is not a directory"):
        check_new(tmp_path / "file" / "below" / "run.jsonl")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(ResultFileError, match=f"{tmp_path} is not writable"):
        check_new(tmp_path / "new" / "run.jsonl")


def test_a_run_that_ends_well_is_complete(tmp_path: Path, example: ResultFile) -> None:
    path = tmp_path / "run.jsonl"
    with ResultWriter(path) as results:
        results.write(example.run)
        results.write(example.samples[0])
        results.write(example.ceiling[0])
    end = read(path).end
    assert end is not None
    assert (end.status, end.samples, end.error) == ("complete", 1, None)


def test_ctrl_c_is_recorded(tmp_path: Path, example: ResultFile) -> None:
    path = tmp_path / "run.jsonl"
    fail_during_a_run(path, example, KeyboardInterrupt())
    result = read(path)
    assert result.end is not None
    assert result.end.status == "interrupted"
    assert result.incomplete == f"{path}: the run was interrupted; 0 samples were recorded"


def test_a_failure_is_recorded_with_its_error_on_one_line(
    tmp_path: Path, example: ResultFile
) -> None:
    path = tmp_path / "run.jsonl"
    fail_during_a_run(path, example, RuntimeError("disk\nfull"))
    result = read(path)
    assert result.end is not None
    assert (result.end.status, result.end.error) == ("failed", "RuntimeError: disk full")
    assert "the run failed (RuntimeError: disk full); 0 samples" in str(result.incomplete)


def test_a_run_that_recorded_nothing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(RuntimeError), ResultWriter(path):
        raise RuntimeError
    assert not path.exists()


def test_records_out_of_order_are_a_mistake_of_ours(tmp_path: Path, example: ResultFile) -> None:
    with ResultWriter(tmp_path / "run.jsonl") as results:
        with pytest.raises(ValueError, match="a sample record is out of order"):
            results.write(example.samples[0])
        results.write(example.run)
        with pytest.raises(ValueError, match="a run record is out of order"):
            results.write(example.run)
        other = End(run_id="other", finished_at=utc_now(), status="complete", samples=0)
        with pytest.raises(ValueError, match="run_id other is not this file's"):
            results.write(other)
        results.close()
        results.close()


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path, example: ResultFile) -> None:
    path = tmp_path / "run.jsonl"
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:-10])

    with ResultWriter(path) as results:
        results.write(example.run)
        before = path.read_bytes()
        with (
            mock.patch("os.write", full),
            pytest.raises(TransferError, match="writing: No space left on device"),
        ):
            results.write(example.samples[0])
        assert path.read_bytes() == before
        results.write(example.samples[1])
    assert read(path).samples == (example.samples[1],)


def test_a_figure_that_is_not_finite_is_never_written(tmp_path: Path, example: ResultFile) -> None:
    path = tmp_path / "run.jsonl"
    run = replace(example.run, plan={"rate": float("inf")})
    with ResultWriter(path) as results, pytest.raises(ValueError, match="not JSON compliant"):
        results.write(run)
    assert not path.exists()


def test_default_paths_name_time_and_workload_and_never_collide(tmp_path: Path) -> None:
    with mock.patch("iobench.results.file.datetime") as clock:
        clock.now.return_value.__format__ = lambda *_: "20260131T120000Z"
        first = default_path("llama7b", tmp_path)
        assert first == tmp_path / "20260131T120000Z-llama7b.jsonl"
        first.touch()
        second = default_path("llama7b", tmp_path)
        assert second.name == "20260131T120000Z-llama7b-2.jsonl"
        second.touch()
        assert default_path("llama7b", tmp_path).name == "20260131T120000Z-llama7b-3.jsonl"
    assert re.fullmatch(r"results/\d{8}T\d{6}Z-my-model.jsonl", str(default_path("../my/model")))


def test_identity() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())
    assert re.fullmatch(r"[0-9a-f]{16}", new_run_id())
    assert new_run_id() != new_run_id()
    assert config_hash({"a": 1, "b": (2,)}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
