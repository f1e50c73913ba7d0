"""A result file grows line by line, is never overwritten, and records how the run ended."""

import errno
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from iobench.errors import ResultFileError, TransferError
from iobench.results import (
    ResultFile,
    ResultWriter,
    check_new,
    config_hash,
    default_path,
    new_run_id,
    read,
    utc_now,
)
from iobench.results.file import RecordFile


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


@pytest.mark.parametrize(
    ("error", "status", "text", "why"),
    [
        (None, "complete", None, ""),
        (KeyboardInterrupt(), "interrupted", None, "was interrupted"),
        (RuntimeError("disk\nfull"), "failed", "RuntimeError: disk full", ""),
    ],
    ids=["complete", "Ctrl-C", "failed"],
)
def test_how_a_run_ended_is_recorded(
    error: BaseException | None,
    status: str,
    text: str | None,
    why: str,
    tmp_path: Path,
    example: ResultFile,
) -> None:
    """An error on one line. A second close has no effect."""
    path = tmp_path / "run.jsonl"
    with pytest.raises(type(error)) if error else nullcontext(), ResultWriter(path) as results:
        results.write(example.run)
        results.write(example.samples[0])
        results.write(example.ceiling[0])
        if error:
            raise error
    results.close()
    result = read(path)
    assert result.end is not None
    assert (result.end.status, result.end.samples, result.end.error) == (status, 1, text)
    why = why or f"failed ({text})"
    said = f"{path}: the run {why}; 1 samples were recorded"
    assert result.incomplete == (said if error else None)


def test_an_interrupt_right_behind_the_header(
    tmp_path: Path, example: ResultFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is in the file, so it stays, and the end says how the run ended."""
    path, append = tmp_path / "run.jsonl", RecordFile.append

    def interrupted(file: RecordFile, values: Mapping[str, Any]) -> None:
        append(file, values)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordFile, "append", interrupted)
    with pytest.raises(KeyboardInterrupt), ResultWriter(path) as results:
        results.write(example.run)
    end = read(path).end
    assert end is not None
    assert end.status == "interrupted"


def test_a_run_that_recorded_nothing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(RuntimeError), ResultWriter(path):
        raise RuntimeError
    assert not path.exists()


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
    for files in ([], [{"path": "x"}], [{"path": "x", "bytes": 1}, {"path": "y", "bytes": 2}]):
        whole = config_hash({"a": 1, "files": files, "z": "é"})
        assert config_hash({"z": "é", "a": 1}, files=iter(files)) == whole
