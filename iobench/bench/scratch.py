"""ScratchDirectory: where a run keeps its checkpoints, removed whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench.bench.interrupts import uninterrupted
from iobench.errors import TargetError

__all__ = ["PREFIX", "require_directory", "scratch_directory"]

PREFIX = ".iobench-run-"
_LOCK = "lock"


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
    killed run left is removed first: a run holds a lock in its directory, and the kernel gives that
    up for it. Raises TargetError when `target` is not a directory that can be written.
    """
    require_directory(target)
    _remove_stale(target)
    directory = target / f"{PREFIX}{secrets.token_hex(6)}"
    lock = -1
    try:
        try:
            with uninterrupted():
                lock = _make(directory)
            yield directory
        finally:
            _remove(directory)
    finally:
        _remove(directory)  # again, should an interrupt have fallen just before the first time
        if lock >= 0:
            os.close(lock)


def _make(directory: Path) -> int:
    """Make `directory` with its lock, held by the descriptor returned.

    It gets its name last: under that name it is never without a lock while its run lives.
    """
    unnamed = directory.with_name(directory.name.replace(PREFIX, ".iobench-new-"))
    try:
        unnamed.mkdir()
        lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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


def _remove(directory: Path) -> None:
    """Remove `directory` if it is there, the lock last: cut off half-way, it is still stale."""
    with uninterrupted():
        if not directory.exists():
            return
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()
        shutil.rmtree(directory)


def _remove_stale(target: Path) -> None:
    for directory in target.glob(f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # all but removed, by a run that is ending or was killed while it did
            with contextlib.suppress(OSError):
                directory.rmdir()
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory)
        except BlockingIOError:
            continue  # its run is alive
        except OSError as error:
            raise TargetError(
                f"{directory}: left by a killed run, cannot be removed ({error.strerror})"
            ) from error
        finally:
            os.close(lock)
