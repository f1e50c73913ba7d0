"""ScratchDirectory: where a run keeps its checkpoints, removed whatever happens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.errors import TargetError

__all__ = ["PREFIX", "require_directory", "scratch_directory"]

PREFIX = ".iobench-run-"
_LOCK = "lock"
_FUSE_RELEASES_WITHIN_S = 10.0


def require_directory(target: Path) -> None:
    """Raise TargetError unless `target` is a directory."""
    try:
        if target.is_dir():
            return
        other = target.exists()
    except OSError as error:  # a directory above it is closed to us
        raise TargetError(f"--target {target}: cannot be reached ({error.strerror})") from error
    if other:
        raise TargetError(f"--target {target}: is no directory; name the one to measure")
    raise TargetError(f"--target {target}: no such directory; make it first")


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """A new directory in `target` for the length of the block.

    It is removed at the end, on an error and on Ctrl-C, which cannot interrupt the removal. What a
    killed run of this user left is removed first: a run holds a lock in its directory, and the
    kernel releases that lock when the run dies. Raises TargetError when `target` is not a directory
    that can be written.
    """
    require_directory(target)
    directory = target / f"{PREFIX}{secrets.token_hex(6)}"
    held = contextlib.ExitStack()
    try:
        try:
            with deferred_interrupts():
                lock = _make(directory)
                held.callback(os.close, lock)
            # By the file system's own word: NFS gives what root makes to another user.
            _remove_stale(target, os.fstat(lock).st_uid)
            yield directory
        finally:
            _remove(directory, held)
    finally:
        _remove(
            directory, held
        )  # again, should an interrupt have fallen just before the first time
        held.close()


def _make(directory: Path) -> int:
    """Make `directory` with its lock, held by the descriptor returned.

    It gets its name last: under that name it is never without a lock while its run lives.
    """
    unnamed = directory.with_name(directory.name.replace(PREFIX, ".iobench-new-"))
    try:
        unnamed.mkdir()
        lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(directory)
        except OSError:
            os.close(lock)
            raise
    except OSError as error:
        shutil.rmtree(unnamed, ignore_errors=True)
        raise TargetError(
            f"--target {directory.parent}: cannot be written ({error.strerror})"
        ) from error
    return lock


def _remove(directory: Path, held: contextlib.ExitStack) -> None:
    """Remove `directory` if it is there, the lock last: cut off half-way, it is still stale.

    `held` closes the lock.
    """
    with deferred_interrupts(), _opened(directory) as fd:
        if fd is not None:
            _empty(fd)
            held.close()
            _remove_empty(directory)


@contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """A descriptor of `directory`; None where no directory is there, or a link.

    Others may write to a target. What they put at a run's name must not lead a removal elsewhere:
    the kernel is told not to follow it, and all below is reached from the descriptor.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _empty(fd: int) -> None:
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in sorted(entries, key=lambda entry: entry[0] == _LOCK):
        if is_directory:
            shutil.rmtree(name, dir_fd=fd)  # which follows no links below
        else:
            os.unlink(name, dir_fd=fd)


def _remove_empty(directory: Path) -> None:
    """Remove `directory`, in which every name was unlinked and every file is closed.

    libfuse keeps a file that is unlinked while it is open as `.fuse_hidden...`. The kernel does not
    wait for the file system to answer the RELEASE that follows the close and removes it.
    """
    until = time.monotonic() + _FUSE_RELEASES_WITHIN_S
    with contextlib.suppress(FileNotFoundError):  # another run saw it without a lock, and was first
        while _only_hidden(os.listdir(directory)) and time.monotonic() < until:
            time.sleep(0.01)
        directory.rmdir()


def _only_hidden(names: list[str]) -> bool:
    return bool(names) and all(name.startswith(".fuse_hidden") for name in names)


def _remove_stale(target: Path, uid: int) -> None:
    """Remove what killed runs of the user `uid` left; what others put there is left alone."""
    for directory in target.glob(f"{PREFIX}*"):
        try:
            with _opened(directory) as fd:
                if fd is not None and os.fstat(fd).st_uid == uid:
                    _remove_unlocked(directory, fd)
        except BlockingIOError:
            continue  # its run is alive
        except FileNotFoundError:
            continue  # another run removed it
        except OSError as error:
            raise TargetError(
                f"{directory}: left by a killed run, cannot be removed ({error.strerror})"
            ) from error


def _remove_unlocked(directory: Path, fd: int) -> None:
    """Raises BlockingIOError where the lock is held."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError:  # all but removed, by a run that is ending or was killed while it did
        with contextlib.suppress(OSError):
            directory.rmdir()
        return
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(fd)
        held.close()
        _remove_empty(directory)
