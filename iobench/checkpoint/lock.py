"""DirectoryLock: one process writes checkpoints to a directory; told by pid and host."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from pathlib import Path

from iobench.errors import TargetError, TransferError
from iobench.writers.files import sync_directory
from iobench.writers.s3_target import is_s3

__all__ = ["LOCK", "DirectoryLock", "lock_location"]

LOCK = ".iobench-lock"
"""The file that is locked; it stays behind, and tells who held it last."""


class DirectoryLock:
    """An flock(2) on a file of `directory`, from when it is made until `release`.

    The kernel releases it when the process ends, however it ends; children that are forked do not
    keep it. Raises TargetError, which names the holder, when somebody holds it, and for what is at
    the name of the lock but is not a file of its own.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK
        self._fd = -1
        fd = _open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            raise TargetError(
                f"{directory} is in use: {_told(holder)}. Close that Checkpointer first; to read "
                "checkpoints meanwhile use iobench.load_checkpoint"
            ) from None
        except OSError as error:
            os.close(fd)
            raise TransferError.wrap(error, "locking", path) from error
        note = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "since_s": int(time.time())}
        ).encode()
        try:  # over what is there, which needs no space on a disk that is full
            os.pwrite(fd, note, 0)
            os.ftruncate(fd, len(note))
        except OSError as error:
            os.close(fd)
            raise TransferError.wrap(error, "locking", path) from error
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Let others have it. Twice does nothing."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)


def _open(path: Path) -> int:
    """A descriptor of the lock, which is made if need be.

    Where others may write to the directory they could put a link there, and the note would go over
    the file that it leads to: neither symbolic nor hard links are taken.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
        found = os.fstat(fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign(path) from error
        raise TransferError.wrap(error, "locking", path) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise _foreign(path)
    return fd


def _foreign(path: Path) -> TargetError:
    return TargetError(
        f"{path}: is a link or not a regular file, so it was not made by a Checkpointer; remove it"
    )


def lock_location(location: str | Path) -> DirectoryLock | None:
    """The lock of a directory, which is made if need be; None for an object store, which has none.

    Raises TargetError when it cannot be made or somebody holds it.
    """
    if is_s3(location):
        return None
    directory = Path(location)
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)
    except OSError as error:
        raise TargetError(
            error.errno, f"cannot be made ({error.strerror})", str(location)
        ) from error
    return DirectoryLock(directory)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child shares the lock as long as it has the descriptor."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def _told(holder: str) -> str:
    try:
        found = json.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since_s"]))
        return f"process {found['pid']} on host {found['host']} holds it since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process holds it, and does not tell which"
