"""StagedCheckpoint: a checkpoint directory that is visible only when it is complete and durable.

The files are written to a hidden directory and synced, the manifest last. Then every directory is
synced, the hidden one is renamed, and the parent is synced. Before the rename no reader sees a part
of it. To replace a checkpoint, the two directories exchange names and the old one is removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from iobench import linux
from iobench.checkpoint.manifest import MANIFEST
from iobench.errors import IobenchError, TargetError, TransferError, transfer_errors
from iobench.regular_file import read_regular
from iobench.writers.local.new_file import make_directories, sync_directory
from iobench.writers.removal import remove_tree

__all__ = [
    *("LOCK", "REPLACED_SUFFIX", "STAGING_SUFFIX", "Backlog", "DirectoryLock"),
    *("Staged", "StagedCheckpoint", "exchange", "lock_directory", "put_back"),
    *("remove_all", "remove_entry", "reraise", "warn_of"),
]

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
        fd = _open(self._path)
        try:
            self._take(fd)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and not isinstance(error, TargetError):
                raise TransferError.wrap(error, "locking", self._path) from error
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


def _open(path: Path) -> int:
    """Return a descriptor of the lock file; create the file if it is missing.

    Links are refused, symbolic and hard. In a directory that others may write to, a link could
    lead to a victim's file, and the note would overwrite it.
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
        f"{path}: is a link or not a regular file, so no Checkpointer made it; remove it"
    )


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


_Key = TypeVar("_Key")


def remove_entry(path: Path) -> None:
    """Remove the entry `path`: a directory with its contents, or only the link if it is one.

    A checkpoint that was moved to another disk and replaced by a link keeps its files there.
    Raises TransferError.
    """
    with transfer_errors("removing", path):
        remove_tree(path) if path.is_dir() else path.unlink()


def remove_all(removals: Mapping[_Key, Callable[[], None]]) -> dict[_Key, IobenchError]:
    """Call all `removals` and return the errors by key. A failure does not stop the others."""
    failures: dict[_Key, IobenchError] = {}
    for key, remove in removals.items():
        try:
            remove()
        except IobenchError as error:
            failures[key] = error
    return failures


class Backlog(Generic[_Key]):
    """Removed checkpoints whose files still take up space. `remove` removes the files of one.

    With many of them a save removes only a few, so that it does not wait for all of them.
    """

    def __init__(self, remove: Callable[[_Key], None]) -> None:
        self._remove = remove
        self._keys: deque[_Key] = deque()
        self._reported: set[_Key] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_Key]:
        return iter(list(self._keys))

    def add(self, key: _Key) -> None:
        """Add the files of one checkpoint. They are the first that `reduce` removes."""
        self._keys.append(key)

    def discard(self, key: _Key) -> None:
        """Remove the files of `key` now. Raises what `remove` raises; then they stay in here."""
        self._remove(key)
        self._keys.remove(key)

    def reduce(self, most: int, enough: Callable[[], bool] = lambda: True) -> list[IobenchError]:
        """Remove the files of at most `most` checkpoints, and then more until `enough()`.

        Returns the errors of those that cannot be removed, each once. They are tried again later.
        """
        new: list[IobenchError] = []
        for count in range(len(self._keys)):
            if not self._keys or (count >= most and enough()):  # a signal handler may save too
                break
            key = self._keys.pop()
            try:
                self._remove(key)
            except BaseException as error:
                self._keys.appendleft(key)
                if not isinstance(error, IobenchError):
                    raise
                new += [] if key in self._reported else [error]
                self._reported.add(key)
        return new


def warn_of(failures: Iterable[IobenchError]) -> None:
    """Give a RuntimeWarning with what was not removed. Without failures, do nothing."""
    names = "; ".join(dict.fromkeys(str(error) for error in failures))
    if names:
        warnings.warn(
            f"no longer needed, but cannot be removed and takes up space: {names}",
            RuntimeWarning,
            stacklevel=3,
        )


STAGING_SUFFIX = ".iobench-staging"

REPLACED_SUFFIX = f".replaced{STAGING_SUFFIX}"
"""Suffix of the temporary name of a replaced checkpoint, where an atomic exchange is missing."""

_SPARE = 4
"""Descriptors that a removal needs: two to list the directory, one per large file."""

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Staged(Protocol):
    """A checkpoint that is being written. It becomes a checkpoint with `publish`."""

    @property
    def directory(self) -> str | Path:
        """Directory or prefix of its files until `publish`."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of these names, before `publish`. Raises TransferError."""

    def publish(self, manifest: Iterable[bytes]) -> None:
        """Make it a checkpoint, durable on return. `manifest` is JSON, in one part or in many."""


class StagedCheckpoint:
    """A hidden directory next to `final` for the files; `publish` renames it to `final`.

    Use it as a context manager. An exit without `publish` removes everything written. An exit after
    `publish` removes the replaced checkpoint; a RuntimeWarning names what cannot be removed. Raises
    TargetError when `final` exists and `replace` is false, and when `lock` is no longer the lock of
    its directory.
    """

    def __init__(
        self,
        final: str | Path,
        *,
        replace: bool = False,
        lock: DirectoryLock | None = None,
    ) -> None:
        self.final = Path(final)
        self.directory = self.final.with_name(
            f".{self.final.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}"
        )
        self._replace, self._lock = replace, lock
        self._spare: list[int] = []

    def __enter__(self) -> Self:
        if os.path.lexists(self.final) and not self._replace:
            raise TargetError(f"{self.final} exists; a checkpoint never replaces another in place")
        self._check_lock()
        with transfer_errors("staging", self.directory):
            self.directory.mkdir()
            try:
                # A removal needs descriptors to list the directory. They are reserved here: a save
                # that fails because the process has no free descriptor must still clean up.
                for _ in range(_SPARE):
                    self._spare.append(os.open(self.directory, os.O_PATH | os.O_CLOEXEC))
            except BaseException:
                self._close_spare()
                self.directory.rmdir()
                raise
        return self

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with transfer_errors("removing", self.directory / name):
                (self.directory / name).unlink()

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def _close_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def publish(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest and rename the directory. On return the checkpoint is durable.

        The files must be synced already; this syncs the directories. Raises TransferError; then
        the previous checkpoint, if any, is still visible, and no part of this one.
        """
        self._check_lock()  # again: a writer recreates directories that were removed since
        with transfer_errors("committing", self.final):
            self._write_manifest(manifest)
            for directory, _, _ in os.walk(self.directory, topdown=False, onerror=reraise):
                sync_directory(directory)
            replaces = self._replace and os.path.lexists(self.final)
            self._exchange() if replaces else self.directory.rename(self.final)
            try:
                sync_directory(self.final.parent)
            except OSError:  # the rename may not be durable: undo it
                self._exchange() if replaces else self.final.rename(self.directory)
                raise

    def _exchange(self) -> None:
        aside = self.final.with_name(f".{self.final.name}{REPLACED_SUFFIX}")
        exchange(self.directory, self.final, aside)

    def _write_manifest(self, manifest: Iterable[bytes]) -> None:
        with (self.directory / MANIFEST).open("xb") as file:
            file.writelines(manifest)
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._close_spare()
        failures = remove_all({"": self._remove})
        if error is None:
            warn_of(failures.values())
        for failure in failures.values():
            if error is not None:
                error.add_note(f"{self.directory}: could not be removed ({failure})")

    def _remove(self) -> None:
        if os.path.lexists(self.directory):
            remove_entry(self.directory)


def exchange(new: Path, final: Path, aside: Path) -> None:
    """Exchange the names `new` and `final`: atomically if the file system can, else via `aside`."""
    try:
        linux.exchange_names(str(new), str(final))
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
        final.rename(aside)
        try:
            new.rename(final)
        except BaseException:  # Ctrl-C too
            aside.rename(final)
            raise
        aside.rename(new)


def reraise(error: OSError) -> None:
    """Raise `error`. os.walk skips a directory that it cannot list, which would stay unsynced."""
    raise error


def put_back(aside: Path) -> None:
    """Rename a replaced checkpoint back to its name, if no new checkpoint has that name."""
    final = aside.with_name(aside.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
    if not final.exists():
        aside.rename(final)
        sync_directory(final.parent)
