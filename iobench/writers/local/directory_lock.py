"""DirectoryLock: one process at a time may write in a directory."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from pathlib import Path

from iobench.errors import TargetError, TransferError, transfer_errors
from iobench.regular_file import open_own, read_regular
from iobench.writers.local.new_file import make_directories

LOCK = ".iobench-lock"
"""The locked file. It stays after `release` and names the last holder."""
_READ = "; iobench.load_checkpoint reads checkpoints without the lock"


class DirectoryLock:
    """An flock(2) on a file in `directory`, from construction until `release`.

    The kernel releases it when the process ends, however it ends. Forked children do not keep it.
    Raises TargetError with the holder when another process holds the lock. Raises TargetError too
    when the lock's name is a link or not a regular file.
    """

    def __init__(self, directory: Path, holder: str = "Checkpointer") -> None:
        """`holder`: what holds the lock, for messages."""
        self._path, self._holder = directory / LOCK, holder
        self._fd, self._note = -1, b""
        with transfer_errors("locking", self._path):
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._take(fd)
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd
        _held.add(self)

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            raise TargetError(
                f"{self._path.parent} is in use: {_describe(holder)}. Close that {self._holder} "
                f"first{_READ if self._holder == 'Checkpointer' else ''}"
            ) from None
        self._note = note = json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since_s": int(time.time()),
                "token": secrets.token_hex(4),
            }
        ).encode()
        os.pwrite(fd, note, 0)  # overwrite, then truncate: needs no space on a full disk
        os.ftruncate(fd, len(note))

    def check(self) -> None:
        """Raise TargetError unless the lock's name still leads to the locked file with our note.

        An flock belongs to the inode, not to the name. After the directory is removed and made
        again, another process can lock the new file. Some file systems of several nodes keep locks
        on each node alone: there a process of another node replaces the note.
        """
        held = os.fstat(self._fd)
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise TransferError.wrap(error, "checking", self._path) from error
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise TargetError(
                f"{self._path.parent} was removed or replaced since this {self._holder} opened it, "
                f"so others may write there: nothing is saved or removed; close this "
                f"{self._holder} and open another"
            )
        with transfer_errors("checking", self._path):
            note = read_regular(self._path)  # opened anew: a network file system asks its server
        if note != self._note:
            raise TargetError(
                f"{self._path.parent} is in use by another job too: "
                f"{_describe(note.decode(errors='replace'))}. Its file system keeps no locks "
                f"between nodes; nothing is saved or removed; close this {self._holder}"
            )

    def fileno(self) -> int:
        """Return the descriptor of the locked file: a process that inherits it holds the lock."""
        return self._fd

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)


def lock_directory(directory: Path, holder: str = "Checkpointer") -> DirectoryLock:
    """Lock `directory`, and create it if it is missing.

    Raises TargetError when it cannot be made or another process holds the lock.
    """
    try:
        make_directories(directory)
    except OSError as error:
        raise TargetError(
            error.errno, f"cannot be made ({error.strerror})", str(directory)
        ) from error
    return DirectoryLock(directory, holder)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the descriptors in a forked child, which would otherwise share the lock."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def _describe(holder: str) -> str:
    try:
        found = json.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since_s"]))
        return f"process {found['pid']} on host {found['host']} holds it since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process holds it; its pid is unknown"
