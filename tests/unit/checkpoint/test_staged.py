"""StagedCheckpoint: a directory that is visible whole, or not at all. DirectoryLock: one process
holds a directory; the error of others names it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench import linux
from iobench.checkpoint import store
from iobench.checkpoint.manifest import MANIFEST
from iobench.checkpoint.object_store import StagedObjects
from iobench.checkpoint.store import STAGING_SUFFIX, StagedCheckpoint
from iobench.errors import TargetError, TransferError
from iobench.writers.local import new_file
from iobench.writers.local.directory_lock import LOCK, DirectoryLock, lock_directory
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _cannot_exchange(one: str, other: str) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _checkpoint(final: Path, fill: Callable[[Path], object]) -> None:
    """A checkpoint with what `fill` puts into its directory before it is published."""
    with StagedCheckpoint(final) as checkpoint:
        fill(checkpoint.directory)
        checkpoint.publish([b"{}"])


def _sync_broken_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing `directory` fails; other directories are synced as ever."""
    working = store.sync_directory

    def sync(which: str | Path) -> None:
        if Path(which) == directory:
            _broken()
        working(which)

    monkeypatch.setattr(store, "sync_directory", sync)


def test_order_of_commit(tmp_path: Path, monkeypatch) -> None:
    """Manifest first, directories from the innermost out, then the rename, then the parent."""
    final = tmp_path / "final"
    done: list[str] = []

    def note_sync(directory: str | Path) -> None:
        assert (final if final.exists() else checkpoint.directory).joinpath(MANIFEST).exists()
        where = Path(directory)
        inside = where.is_relative_to(checkpoint.directory)
        done.append(str(where.relative_to(checkpoint.directory)) if inside else where.name)

    def note_rename(self: Path, target: Path) -> Path:
        done.append("rename")
        os.rename(self, target)
        return target

    monkeypatch.setattr(store, "sync_directory", note_sync)
    with StagedCheckpoint(final) as checkpoint:
        (checkpoint.directory / "a" / "b").mkdir(parents=True)
        monkeypatch.setattr(Path, "rename", note_rename)
        checkpoint.publish([b"{}"])
    assert done == ["a/b", "a", ".", "rename", tmp_path.name]


def test_error_inside_leaves_nothing(tmp_path: Path) -> None:
    """An exception in the block is passed on, and everything written is removed."""

    def fill(directory: Path) -> None:
        (directory / "nested").mkdir()
        (directory / "nested" / "file").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _checkpoint(tmp_path / "final", fill)
    assert not list(tmp_path.iterdir())


def test_never_replaces(tmp_path: Path) -> None:
    """A checkpoint of that name is left alone; nothing is begun. Where the parent is missing, the
    error names what could not be made."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "file").write_bytes(b"the last good one")
    with pytest.raises(TargetError, match="final exists"), StagedCheckpoint(tmp_path / "final"):
        pytest.fail("the block was entered")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "file").read_bytes() == b"the last good one"
    with pytest.raises(TransferError, match="staging") as caught:
        StagedCheckpoint(tmp_path / "none" / "final").__enter__()
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("exchange", [True, False])
def test_replaces_on_request(exchange: bool, tmp_path: Path, monkeypatch) -> None:
    """The old one stays until the new one is whole; with and without renameat2."""
    if not exchange:
        monkeypatch.setattr(linux, "exchange_names", _cannot_exchange)
    final = tmp_path / "final"
    _checkpoint(final, lambda directory: (directory / "old").touch())
    with StagedCheckpoint(final, replace=True) as checkpoint:
        (checkpoint.directory / "new").touch()
        assert (final / "old").exists()
        checkpoint.publish([b"{}"])
        assert (final / "new").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert {p.name for p in final.iterdir()} == {"new", MANIFEST}


@pytest.mark.parametrize("how", ["exchanged", "renamed", "interrupted"])
def test_replacing_is_taken_back(how: str, tmp_path: Path, monkeypatch) -> None:
    """When the parent cannot be synced, or after Ctrl-C between two renames, the old one has its
    name again."""
    if how != "exchanged":
        monkeypatch.setattr(linux, "exchange_names", _cannot_exchange)
    final = tmp_path / "final"
    _checkpoint(final, lambda directory: (directory / "old").touch())
    checkpoint, rename = StagedCheckpoint(final, replace=True), Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path == checkpoint.directory:
            raise KeyboardInterrupt
        return rename(path, target)

    if how == "interrupted":
        monkeypatch.setattr(Path, "rename", interrupted)
    else:
        _sync_broken_in(tmp_path, monkeypatch)
    error = KeyboardInterrupt if how == "interrupted" else TransferError
    with pytest.raises(error), checkpoint:
        checkpoint.publish([b"{}"])
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert {p.name for p in final.iterdir()} == {"old", MANIFEST}


def test_another_process_publishes_first(tmp_path: Path) -> None:
    """A checkpoint that another process published under the name is not replaced."""
    final = tmp_path / "final"

    def appear(_: Path) -> None:
        final.mkdir()
        (final / "file").write_bytes(b"another's")

    with pytest.raises(TransferError, match="committing"):
        _checkpoint(final, appear)
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert [p.name for p in final.iterdir()] == ["file"]


_FAILING = {"fsync": (os, "fsync"), "rename": (Path, "rename"), "listing": (os, "scandir")}


@pytest.mark.parametrize("fails", [*_FAILING, "sync of a directory in it", "sync of its name"])
def test_failed_commit_leaves_nothing(fails: str, tmp_path: Path, monkeypatch) -> None:
    """Whichever call the kernel fails, nothing is visible and the errno is kept. A name that is not
    durable is taken back."""

    def fill(directory: Path) -> None:
        (directory / "nested").mkdir()
        (directory / "nested" / "file").write_bytes(b"whole")
        if fails in _FAILING:
            monkeypatch.setattr(*_FAILING[fails], _broken)
        else:
            in_it = "in it" in fails
            _sync_broken_in(directory / "nested" if in_it else tmp_path, monkeypatch)

    with pytest.raises(TransferError, match="committing") as caught:
        _checkpoint(tmp_path / "final", fill)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "final"))
    assert not (tmp_path / "final").exists()
    assert fails == "listing" or not list(tmp_path.iterdir())  # it cannot be removed either


def test_objects_that_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket: the removal's error is raised, or is a note on the error of the block."""

    def refuse(*_: object) -> None:
        raise TransferError(5, "SlowDown", "s3://bucket/step-1")

    monkeypatch.setattr(S3Objects, "keys", lambda _: [])
    monkeypatch.setattr(S3Objects, "delete", refuse)
    with (
        pytest.raises(TransferError, match="SlowDown"),
        StagedObjects("s3://bucket/step-1", S3Writer()),
    ):
        pass
    with (
        pytest.raises(KeyError) as caught,
        StagedObjects("s3://bucket/step-1", S3Writer()),
    ):
        raise KeyError("a save that fails")
    (note,) = caught.value.__notes__
    assert "s3://bucket/step-1: what was written could not be removed" in note


_CHILD = """
import sys
from collections.abc import Callable
from pathlib import Path
from iobench.writers.local.directory_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_held_by_another_process(tmp_path: Path) -> None:
    """The error names pid and host; killing the holder frees the directory."""
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(
            TargetError, match=f"process {child.pid} on host {socket.gethostname()}"
        ):
            DirectoryLock(tmp_path)
        child.kill()
    DirectoryLock(tmp_path).release()


def test_a_full_disk_leaves_it_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that cannot be written is an error, and the directory is free again."""

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(TransferError, match="No space left") as caught:
            DirectoryLock(tmp_path)
    assert caught.value.filename == str(tmp_path / LOCK)
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("plant", [os.symlink, os.link, lambda _, lock: os.mkfifo(lock)])
def test_what_others_put_at_its_name(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """It is refused, and the file that a link leads to keeps its bytes."""
    victim = tmp_path / "victim"
    victim.write_text("x" * 1000)
    (tmp_path / "run").mkdir()
    plant(victim, tmp_path / "run" / LOCK)
    with pytest.raises(TargetError, match="is a link, a special file"):
        DirectoryLock(tmp_path / "run")
    assert victim.read_text() == "x" * 1000


def test_forked_children_do_not_keep_it(tmp_path: Path) -> None:
    """A data loader's worker that outlives the trainer does not hold the directory."""
    lock = DirectoryLock(tmp_path)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(done[1])  # so that the end of the parent ends it too
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        lock.release()
        DirectoryLock(tmp_path).release()
    finally:  # otherwise a failure here leaves a process that waits for ever
        for fd in (*ready, *done):
            os.close(fd)
        os.waitpid(child, 0)


def test_makes_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing directory is made, durable under its name; a file in its place is an error."""
    synced: list[str] = []
    monkeypatch.setattr(new_file, "sync_directory", synced.append)
    lock_directory(tmp_path / "runs" / "a").release()
    assert synced == [str(tmp_path), str(tmp_path / "runs")]
    lock_directory(tmp_path / "runs" / "a").release()
    assert len(synced) == 2
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="file"):
        lock_directory(tmp_path / "file" / "a")


def test_another_node_takes_it_where_locks_are_local(tmp_path: Path) -> None:
    """On such a file system another node can lock the same file: its note replaces ours."""
    lock = lock_directory(tmp_path)
    lock.check()
    (tmp_path / LOCK).write_text('{"pid": 7, "host": "node9", "since_s": 0, "token": "x"}')
    with pytest.raises(TargetError, match="in use by another job too: process 7 on host node9"):
        lock.check()
    lock.release()


def test_staging_is_hidden_and_apart(tmp_path: Path) -> None:
    """Two stagings of one name do not meet, and what a killed process leaves is recognizable."""
    first, second = (StagedCheckpoint(tmp_path / "final") for _ in range(2))
    with first, second:
        assert first.directory != second.directory
        for one in (first, second):
            assert one.directory.name.startswith(".final.")
            assert one.directory.name.endswith(STAGING_SUFFIX)
