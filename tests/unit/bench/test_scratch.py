"""The scratch directory is removed, however the block ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.targets import directory as scratch
from iobench.bench.targets.directory import PREFIX, scratch_directory
from iobench.errors import TargetError
from iobench.writers.local.directory_lock import LOCK, DirectoryLock
from iobench.writers.own_directory import OwnDirectory

_OURS = f"{PREFIX}{os.geteuid()}-"


def fill(directory: Path) -> None:
    """Make files and directories like a run."""
    (directory / "step-0/global").mkdir(parents=True)
    (directory / "step-0/global/file").write_bytes(b"x" * 100)
    (directory / "file").write_bytes(b"x")


def fail_inside(target: Path, error: BaseException) -> None:
    """Run that writes files and then raises `error`."""
    with scratch_directory(target) as directory:
        fill(directory)
        raise error


def left_by_a_killed_run(target: Path, *, lock: bool = True) -> Path:
    """A directory whose lock no process holds."""
    directory = target / f"{_OURS}dead"
    directory.mkdir()
    if lock:
        fill(directory)
        (directory / LOCK).touch()
    return directory


def test_a_second_interrupt_does_not_stop_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the removal takes effect after it."""
    rmtree = shutil.rmtree

    def interrupted(path: str, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fail_inside(tmp_path, KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_just_before_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the end of the block and the removal does not prevent the removal."""
    remove, calls = scratch._remove, []

    def late(own: OwnDirectory) -> None:
        calls.append(own)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(own)

    monkeypatch.setattr(scratch, "_remove", late)
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path) as directory:
        fill(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_at_the_end_of_its_removal(tmp_path: Path) -> None:
    """The lock is removed last, so a directory without a lock is empty, and is removed too."""
    left_by_a_killed_run(tmp_path, lock=False)
    with scratch_directory(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory]


def test_what_others_put_at_the_name_of_a_run_is_not_followed(tmp_path: Path) -> None:
    """A link to a directory with a `lock`, links in a run's directory, and another user's
    directory."""
    target, victim = tmp_path / "target", tmp_path / "victim"
    target.mkdir()
    victim.mkdir()
    fill(victim)
    (victim / LOCK).touch()
    before = sorted(victim.rglob("*"))
    (target / f"{_OURS}link").symlink_to(victim)
    inside = left_by_a_killed_run(target)
    (inside / "link").symlink_to(victim)
    (inside / "step-0/link").symlink_to(victim)
    alone = target / f"{_OURS}locked-elsewhere"
    alone.mkdir()
    (alone / LOCK).symlink_to(victim / LOCK)
    with scratch_directory(target) as directory:
        assert sorted(target.iterdir()) == sorted([directory, target / f"{_OURS}link", alone])
        directory.rename(tmp_path / "moved")
        directory.symlink_to(victim)
    assert sorted(victim.rglob("*")) == before


@pytest.mark.root
def test_what_a_writer_mounted_is_unmounted_and_stays(
    shared_filesystems: Callable[..., Path], tmp_path: Path
) -> None:
    """At a file, twice over a directory, and over a directory of a killed run."""
    target = shared_filesystems("tmpfs") / tmp_path.name
    victim = target / "victim"
    victim.mkdir(parents=True)
    fill(victim)
    before = sorted(victim.rglob("*"))
    dead = left_by_a_killed_run(target)
    subprocess.run(["mount", "--bind", victim, dead / "step-0"], check=True)
    with scratch_directory(target) as directory:
        assert not dead.exists()
        fill(directory)
        subprocess.run(["mount", "--bind", victim / "file", directory / "file"], check=True)
        for _ in range(2):
            subprocess.run(["mount", "--bind", victim, directory / "step-0"], check=True)
    assert list(target.iterdir()) == [victim]
    assert sorted(victim.rglob("*")) == before


def test_what_another_user_left_stays(tmp_path: Path) -> None:
    """A free lock does not permit this user to remove it."""
    left = left_by_a_killed_run(tmp_path)
    theirs = left.rename(tmp_path / f"{PREFIX}{os.geteuid() + 1}-dead")
    with scratch_directory(tmp_path):
        pass
    assert (theirs / "step-0/global/file").exists()


def test_nothing_else_in_the_target_is_touched(tmp_path: Path) -> None:
    """The user's files and hidden files stay."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".iobench-notes").write_text("mine too")
    with scratch_directory(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".iobench-notes", "mine"]


@pytest.mark.parametrize(("where", "call"), [(Path, "mkdir"), (fcntl, "flock")])
def test_a_target_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, call: str
) -> None:
    """The error is a TargetError, and no file is left."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(where, call, refuse)
    with pytest.raises(TargetError, match="Read-only file system"), scratch_directory(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_run_stays_until_it_has_ended(tmp_path: Path) -> None:
    """The next run removes it when its lock is free."""
    left = left_by_a_killed_run(tmp_path)
    alive = DirectoryLock(left)
    with scratch_directory(tmp_path) as directory:
        assert sorted(tmp_path.iterdir()) == sorted([directory, left])
    alive.release()
    with scratch_directory(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.root
def test_what_libfuse_hides_is_awaited(
    shared_filesystems: Callable[..., Path], tmp_path: Path
) -> None:
    """The file of the lock is removed while it is open: libfuse renames it until its close."""
    target = shared_filesystems("fuse") / tmp_path.name
    target.mkdir()
    left_by_a_killed_run(target)
    with scratch_directory(target) as directory:
        fill(directory)
        assert list(target.iterdir()) == [directory]
    assert list(target.iterdir()) == []
