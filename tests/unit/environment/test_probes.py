"""The probes, with simulated refusals of the kernel."""

from __future__ import annotations

import errno
import os
import re
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


@pytest.mark.parametrize(
    ("written", "ok"), [(0, True), (2**20, True), (2**20 + 512, False), (None, True)]
)
def test_a_device_that_others_use_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None, ok: bool
) -> None:
    """More than 1 MiB/s of other I/O is a warning with a remedy. On tmpfs and network file systems
    the I/O of others is unknown."""
    counts = [
        None if written is None else DeviceCounters(read_bytes=0, write_bytes=size)
        for size in (0, written)
    ]
    monitor = SimpleNamespace(read=iter(counts).__next__)
    monkeypatch.setattr(probes, "DeviceMonitor", lambda _: monitor)
    monkeypatch.setattr(time, "perf_counter", iter([10.0, 11.0]).__next__)
    probe = probes._run("other I/O", probes._other_io, tmp_path)
    assert (probe.ok, probe.needed) == (ok, False)
    assert bool(probe.remedy) is not ok
    assert ("no block device of this machine" in probe.detail) is (written is None)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After all probes the directory is empty again. fsync of files, rename over a file and rename
    of a directory work everywhere."""
    found = {probe.name: probe for probe in probe_directory(tmp_path)}
    assert len(found) == 9
    assert found["fsync"].ok
    assert found["rename"].ok
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


_REFUSED = refuse(errno.EOPNOTSUPP)


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("fallocate", {"fallocate": _REFUSED}, "EOPNOTSUPP"),
        ("page cache", {"resident_bytes": lambda _: (0, "mincore")}, "cannot be proved"),
        (
            "RWF_DONTCACHE",
            {"kernel_version": lambda: (6, 1), "os.pwritev": _REFUSED},
            "needs Linux 6.14",
        ),
        (
            "RWF_DONTCACHE",
            {"kernel_version": lambda: (6, 14), "os.pwritev": _REFUSED},
            "this file system does not implement it",
        ),
        # If eviction has no effect, cold reads are impossible.
        ("eviction", {"resident_bytes": lambda _: (4096, "mincore")}, r"4\.00 KiB .*mincore"),
        # A file system that accepts O_DIRECT and fills the page cache; alignments of zero.
        (
            "O_DIRECT",
            {"dio_alignment": lambda _: None, "resident_bytes": lambda _: (65536, "cachestat")},
            "page cache",
        ),
        (
            "O_DIRECT",
            {"dio_alignment": lambda _: DioAlignment(memory=0, offset=0)},
            "admits no direct I/O",
        ),
    ],
)
def test_what_does_not_work_is_named_and_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changed: dict[str, Any], says: str
) -> None:
    """Errors are shown by their names. Eviction and O_DIRECT are needed, others have an
    alternative."""
    for function, other in changed.items():
        monkeypatch.setattr(f"iobench.environment.probes.{function}", other)
    probe = one(tmp_path, name)
    assert not probe.ok
    assert probe.needed == (name in ("eviction", "O_DIRECT"))
    assert re.search(says, f"{probe.detail} {probe.remedy}")
    assert probe.remedy


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
    (first,) = probe_directory(tmp_path)
    assert (first.name, first.ok) == ("write", False)
    assert "EROFS" in first.detail


@pytest.mark.parametrize("call", [probe_directory, describe_storage])
def test_targets_that_are_no_directory(tmp_path: Path, call: Any) -> None:
    """A missing target and a file are refused in one sentence, before any probe."""
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="no such directory"):
        call(tmp_path / "missing")
    with pytest.raises(TargetError, match="is not a directory"):
        call(tmp_path / "file")
