"""ScratchDirectory: where a run keeps its checkpoints, removed whatever happens."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench.errors import TargetError

__all__ = ["PREFIX", "scratch_directory"]

PREFIX = ".iobench-run-"
_LOCK = "lock"


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """A new directory in `target` for the length of the block.

    It is removed at the end, on an error and on Ctrl-C, which cannot interrupt the removal. What a
    killed run left is removed first: a run holds a lock in its directory, and the kernel gives that
    up for it. Raises TargetError when `target` is not a directory that can be written.
    """
    if not target.is_dir():
        raise TargetError(f"--target {target}: no such directory; make it first")
    _remove_stale(target)
    directory = target / f"{PREFIX}{secrets.token_hex(6)}"
    try:
        directory.mkdir()
    except OSError as error:
        raise TargetError(f"--target {target}: cannot be written ({error.strerror})") from error
    lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        with _uninterrupted():
            shutil.rmtree(directory)
            os.close(lock)


def _remove_stale(target: Path) -> None:
    for directory in target.glob(f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another run is just making or removing it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        except BlockingIOError:
            continue  # its run is alive
        except OSError as error:
            raise TargetError(
                f"{directory}: left by a killed run, cannot be removed ({error.strerror})"
            ) from error
        finally:
            os.close(lock)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back, in the main thread, until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
