"""What the kernel can show about files in a directory, and the inspection of files."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iobench import linux
from iobench.bench.targets.instruments import Changes, Instruments
from iobench.environment import probes
from iobench.environment.blockdev import DeviceCounters, parse_stat
from iobench.environment.mounts import parse_mountinfo
from iobench.environment.probes import BY_A_LIBRARY
from iobench.units import KIB

PROBE = 256 * KIB


class _Device:
    """A device whose counters have grown by `step` bytes and `flushes` at each reading."""

    files = ()

    def __init__(self, step: int, flushes: int = 0) -> None:
        self._step, self._flushes, self._readings = step, flushes, 0

    def read(self) -> DeviceCounters | None:
        self._readings += 1
        sectors, flushes = self._readings * self._step // 512, self._readings * self._flushes
        return parse_stat(f"0 0 0 0 0 0 {sectors} 0 0 0 0 0 0 0 0 {flushes} 0")


@pytest.mark.parametrize(
    ("kind", "counts", "unseen", "ignored"),
    [
        ("ext4", (PROBE, 0, 0), "", ""),
        ("overlay", (0, 0, 0), "cachestat shows no dirty pages on this file system", ""),
        ("tmpfs", (PROBE, PROBE, PROBE), "pages stay dirty after a sync on this file system", ""),
        ("ext4", (errno.ENOSYS,), f"no cachestat here ({os.strerror(errno.ENOSYS)})", ""),
        ("ext4", (PROBE, PROBE, 0), "", BY_A_LIBRARY),
        ("xfs", (PROBE, PROBE, PROBE), "", "pages of xfs stay dirty after fsync(2)"),
    ],
)
def test_the_probe_finds_out_what_can_be_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    counts: tuple[int, ...],
    unseen: str,
    ignored: str,
) -> None:
    """Like ext4; overlayfs, FUSE and DAX; tmpfs; Linux before 6.5; a preloaded library; a filter
    that ignores the system call. No file is left behind."""
    answers = iter(counts)

    def counted(fd: int) -> int:
        answer = next(answers)
        if answer == errno.ENOSYS:
            raise OSError(answer, os.strerror(answer))
        return answer

    mount = parse_mountinfo(f"1 0 0:1 / / rw - {kind} none rw")[0]
    monkeypatch.setattr(probes, "mount_of", lambda _: mount)
    monkeypatch.setattr(linux, "cachestat_unsynced_bytes", counted)
    found = Instruments.probe(tmp_path, _Device(PROBE))
    assert found == Instruments(unseen=unseen, ignored_syncs=ignored, device_counts=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("step", "counts"), [(PROBE, True), (PROBE // 2, False), (0, False)])
def test_a_device_that_counts_less_than_was_written_is_not_asked(
    tmp_path: Path, step: int, counts: bool
) -> None:
    """Like native NVMe multipath, whose counter stays at zero."""
    assert Instruments.probe(tmp_path, _Device(step)).device_counts is counts


@pytest.mark.parametrize("flushes", [0, 2])
def test_flushes_are_asked_about_where_a_sync_moves_their_counter(
    tmp_path: Path, flushes: int
) -> None:
    """It stays at zero for device mapper, and for a device without a cache."""
    assert Instruments.probe(tmp_path, _Device(PROBE, flushes)).flush_counts is bool(flushes)


def test_other_errors_of_the_probe_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(linux, "cachestat_unsynced_bytes", broken)
    with pytest.raises(OSError, match="Input/output error"):
        Instruments.probe(tmp_path, _Device(PROBE))


def test_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are not regular or not of the reported size are named. Dirty pages are added
    up."""
    monkeypatch.setattr(linux, "cachestat_unsynced_bytes", lambda fd: os.fstat(fd).st_size)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/good").write_bytes(bytes(10))
    (tmp_path / "a/short").write_bytes(bytes(9))
    (tmp_path / "manifest").write_bytes(b"not reported, and synced by others")
    (tmp_path / "link").symlink_to(tmp_path / "a/good")
    (tmp_path / "to-directory").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    files = [("a/good", 10), ("a/short", 10), ("gone", 10)]
    found = Instruments().inspect(tmp_path, files)
    assert sorted(found.problems) == [
        "a/short has 9 bytes, 10 were reported",
        "gone is missing",
        "link is a symbolic link",
        "pipe is not a regular file",
        "to-directory is a symbolic link",
    ]
    assert (found.unsynced_bytes, found.unseen) == (10 + 9 + 34, "")
    hidden = Instruments(unseen="no pages").inspect(tmp_path, files)
    assert (hidden.unsynced_bytes, hidden.unseen) == (None, "no pages")
    assert hidden.problems == found.problems


@pytest.mark.parametrize("reserved", [False, True])
def test_a_hole_is_found(tmp_path: Path, reserved: bool) -> None:
    """Space that was never written, in a file of the right size. Only the given files count."""
    for name in ("whole", "holed", "other"):
        with (tmp_path / name).open("wb") as file:
            file.write(bytes(16 * KIB))
            if name != "whole":
                file.truncate(64 * KIB)
            if reserved:
                os.posix_fallocate(file.fileno(), 0, 16 * KIB if name == "whole" else 64 * KIB)
            os.fsync(file.fileno())
    with (tmp_path / "other").open("rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 64 * KIB:
            pytest.skip("this file system shows no holes")
    files = [("whole", 16 * KIB), ("holed", 64 * KIB)]
    found = Instruments(unseen="not asked").inspect(tmp_path, files)
    assert found.problems == (f"holed has a hole at byte {16 * KIB}",)


def test_a_file_that_changes_between_two_inspections(tmp_path: Path) -> None:
    """Its content or its name: the time of its change shows both. New files are no change."""
    for name in "abcd":
        (tmp_path / name).write_bytes(bytes(10))
    changes, files, local = Changes(), [("d", 10), ("a", 10)], Instruments()
    assert local.inspect(tmp_path, files, changes).problems == ()
    assert local.inspect(tmp_path, files, changes).problems == ()
    (tmp_path / "new").touch()
    changes.of_files[1], changes.of_others["c"] = 0, 0  # a clock may be too coarse for real changes
    found = local.inspect(tmp_path, files, changes)
    assert found.problems == ("a was changed after its save", "c was changed after its save")
    remote = Instruments(device_counts=False)
    assert remote.inspect(tmp_path, files, changes).problems == ()


@pytest.mark.root
def test_a_file_of_another_file_system(tmp_path: Path, shared_filesystems: Any) -> None:
    """A bind mount hides where its bytes are."""
    (tmp_path / "a").touch()
    other = shared_filesystems("tmpfs", 2**20) / tmp_path.name
    other.write_bytes(bytes(10))
    subprocess.run(["mount", "--bind", str(other), str(tmp_path / "a")], check=True)
    try:
        found = Instruments().inspect(tmp_path, [("a", 10)])
    finally:
        subprocess.run(["umount", str(tmp_path / "a")], check=True)
    assert "a is on another file system" in found.problems


def test_a_checkpoint_that_is_gone_has_no_files(tmp_path: Path) -> None:
    assert Instruments().inspect(tmp_path / "gone", [("a", 1)]).problems == ("a is missing",)


@pytest.mark.root
def test_what_was_mounted_before_is_no_problem(
    new_filesystem: Callable[..., Path], tmp_path: Path
) -> None:
    """A target may be a mount point. A file or directory that is mounted later is named."""
    target = new_filesystem("tmpfs")
    instruments = Instruments.probe(target, _Device(PROBE))
    (target / "file").touch()
    files = [("file", 0)]
    assert instruments.inspect(target, files).problems == ()
    (tmp_path / "other").touch()
    subprocess.run(["mount", "--bind", tmp_path / "other", target / "file"], check=True)
    try:
        assert instruments.inspect(target, files).problems == ("file is a mount point",)
    finally:
        subprocess.run(["umount", target / "file"], check=True)
