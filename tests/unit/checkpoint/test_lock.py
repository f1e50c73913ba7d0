"""One process holds a directory; the error of others names it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.checkpoint.staged import LOCK, DirectoryLock, lock_directory
from iobench.errors import TargetError, TransferError
from iobench.writers.local import new_file

_CHILD = """
import sys
from collections.abc import Callable
from pathlib import Path
from iobench.checkpoint.staged import DirectoryLock
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
    with pytest.raises(TargetError, match="is a link or not a regular file"):
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
