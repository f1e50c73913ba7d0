"""The probes, with simulated refusals of the kernel."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iobench.environment import (
    DeviceCounters,
    Probe,
    describe_storage,
    probe_directory,
    probes,
)
from iobench.errors import TargetError
from iobench.linux import DioAlignment


def refuse(number: int) -> Any:
    """Return a call that fails with that errno."""

    def call(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def one(directory: Path, name: str) -> Probe:
    return next(probe for probe in probe_directory(directory) if probe.name == name)


@pytest.fixture(autouse=True)
def _no_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which the device is watched."""
    monkeypatch.setattr(probes, "_WATCH_S", 0.0)


@pytest.mark.parametrize(("written", "ok"), [(0, True), (2**20, True), (2**20 + 512, False)])
def test_a_device_that_others_use_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, ok: bool
) -> None:
    """More than 1 MiB/s of other I/O is a warning with a remedy."""
    readings = iter([device(0), device(written)])
    monitor = SimpleNamespace(read=readings.__next__)
    monkeypatch.setattr(probes, "DeviceMonitor", lambda _: monitor)
    monkeypatch.setattr(time, "perf_counter", iter([10.0, 11.0]).__next__)
    probe = probes._run("other I/O", probes._other_io, tmp_path)
    assert (probe.ok, probe.needed) == (ok, False)
    assert bool(probe.remedy) is not ok


def test_no_device_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tmpfs and network file systems the I/O of others is unknown."""
    monkeypatch.setattr(probes, "DeviceMonitor", lambda _: SimpleNamespace(read=lambda: None))
    assert (
        probes._run("other I/O", probes._other_io, tmp_path).detail
        == "no block device of this machine: not checked"
    )


def device(write_bytes: int) -> DeviceCounters:
    return DeviceCounters(read_bytes=0, write_bytes=write_bytes)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After all probes the directory is empty again."""
    found = probe_directory(tmp_path)
    assert len({probe.name for probe in found}) == len(found) == 12
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_on_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a probe propagates, and the files are removed."""

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plain_things_work_on_every_file_system(tmp_path: Path) -> None:
    """fsync of files, rename over a file and rename of a directory work in the temporary
    directory."""
    by_name = {probe.name: probe.ok for probe in probe_directory(tmp_path)}
    assert by_name["fsync"]
    assert by_name["rename"]


@pytest.mark.parametrize(
    ("name", "function"), [("fallocate", "fallocate"), ("cachestat", "cachestat_resident_bytes")]
)
def test_a_refusal_is_named_and_has_a_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, function: str
) -> None:
    """EOPNOTSUPP is shown by its name, with the alternative, and is not a failure."""
    monkeypatch.setattr(probes, function, refuse(errno.EOPNOTSUPP))
    probe = one(tmp_path, name)
    assert (probe.ok, probe.needed) == (False, False)
    assert "EOPNOTSUPP" in probe.detail
    assert probe.remedy


@pytest.mark.parametrize(
    ("kernel", "number", "word"),
    [
        ((6, 1), errno.EOPNOTSUPP, "needs Linux 6.14"),
        ((6, 14), errno.EOPNOTSUPP, "this file system does not implement it"),
    ],
)
def test_why_dontcache_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: tuple[int, int],
    number: int,
    word: str,
) -> None:
    """An old kernel and a file system without it have different messages."""
    monkeypatch.setattr(probes, "kernel_version", lambda: kernel)
    monkeypatch.setattr(os, "pwritev", refuse(number))
    assert word in one(tmp_path, "RWF_DONTCACHE").detail


def test_pages_that_stay_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If eviction has no effect, cold reads are impossible, and the message says so."""
    monkeypatch.setattr(probes, "resident_bytes", lambda _: (4096, "mincore"))
    probe = one(tmp_path, "eviction")
    assert (probe.ok, probe.needed) == (False, True)
    assert "4.00 KiB" in probe.detail
    assert "mincore" in probe.detail


def test_a_file_system_that_caches_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that sees nothing of the written bytes cannot prove a cold read."""
    monkeypatch.setattr(probes, "cachestat_resident_bytes", lambda _: 0)
    probe = one(tmp_path, "cachestat")
    assert not probe.ok
    assert "cannot be proved" in probe.remedy


def test_direct_io_that_is_only_an_appearance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that accepts O_DIRECT and fills the page cache is detected."""
    monkeypatch.setattr(probes, "dio_alignment", lambda _: None)
    monkeypatch.setattr(probes, "resident_bytes", lambda _: (65536, "cachestat"))
    probe = one(tmp_path, "O_DIRECT")
    assert not probe.ok
    assert "page cache" in probe.detail


def test_direct_io_that_statx_denies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alignments of zero mean no direct I/O, and nothing is written."""
    monkeypatch.setattr(probes, "dio_alignment", lambda _: DioAlignment(memory=0, offset=0))
    probe = one(tmp_path, "O_DIRECT")
    assert not probe.ok
    assert "admits no direct I/O" in probe.detail


def test_direct_io_refused_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL means a file system without O_DIRECT; any other error is reported unchanged."""
    monkeypatch.setattr(os, "open", refuse(errno.EINVAL))
    assert probes._direct(tmp_path)[0] is False
    monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        probes._direct(tmp_path)


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is the only finding about the directory."""
    import tempfile

    monkeypatch.setattr(tempfile, "mkdtemp", refuse(errno.EROFS))
    first, *rest = probe_directory(tmp_path)
    assert (first.name, first.ok) == ("write", False)
    assert "EROFS" in first.detail
    assert [probe.name for probe in rest] == ["drop_caches"]


@pytest.mark.parametrize("call", [probe_directory, describe_storage])
def test_targets_that_are_no_directory(tmp_path: Path, call: Any) -> None:
    """A missing target and a file are refused in one sentence, before any probe."""
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="no such directory"):
        call(tmp_path / "missing")
    with pytest.raises(TargetError, match="is not a directory"):
        call(tmp_path / "file")
