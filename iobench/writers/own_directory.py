"""OwnDirectory: a hidden directory of one process; a later process removes it after a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from iobench.errors import TargetError, TransferError
from iobench.writers.local.directory_lock import LOCK, DirectoryLock
from iobench.writers.removal import remove_tree

_TRIES = 100
_PATIENCE_S = 60.0
_FUSE_RELEASES_WITHIN_S = 10.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_CHANGED = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}
"""Another process has changed the directory since this one has looked."""


class OwnDirectory:
    """The directory `root`, which belongs to this process from `make` until `remove`.

    A file in it is locked; the kernel releases the lock when the process ends. So `remove_killed`
    of another process removes what a killed one leaves. Where the file system has no locks it
    stays.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: DirectoryLock | None = None
        self._others = False

    def make(self) -> None:
        """Create the directory. Raises OSError; then it does not exist, or another process has it.

        After Ctrl-C anywhere in here, `remove` removes it.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while self._lock is None:
            try:
                self.root.mkdir()
            except FileExistsError:
                self._others = True
                raise
            try:
                self._lock = DirectoryLock(self.root, "save")
                self._lock.check()
            except (TargetError, TransferError) as error:
                self._release()
                if error.errno in _NO_LOCKS:
                    return
                # Until it was locked, `remove_killed` took it for one that was left.
                removed = error.errno in (None, errno.ENOENT)
                while removed and os.path.lexists(self.root) and time.monotonic() < until_s:
                    time.sleep(0.001)
                if not removed or os.path.lexists(self.root):
                    _remove(self.root, None)
                    raise

    def remove(self) -> None:
        """Remove the directory and its content, if it exists, the file of the lock last."""
        try:
            if not self._others:
                _remove(self.root, self._lock)
        finally:
            self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def remove_killed(
    parent: Path, pattern: str, prepare: Callable[[Path], None] = lambda _: None
) -> None:
    """Remove the own directories in `parent` whose process has ended: their lock is free.

    `pattern` is that of their names; `prepare` is called with each before. A directory without the
    file of the lock is of another kind and stays, unless it is empty: it is new, or nearly removed.
    """
    for left in parent.glob(pattern):
        if left.is_symlink():
            continue
        if not (left / LOCK).is_file():
            with contextlib.suppress(OSError):
                left.rmdir()
            continue
        try:
            lock = DirectoryLock(left, "save")
        except (TargetError, TransferError):  # in use, or already removed
            continue
        try:
            prepare(left)
            _remove(left, lock)
        finally:
            lock.release()


def _remove(root: Path, lock: DirectoryLock | None) -> None:
    """Remove `root`, if it exists; the file of its `lock` last, as `remove_killed` looks for it.

    Once the file of its lock is gone, another process may make it anew in `remove_killed`, and
    remove `root` at the same time.
    """
    for left in reversed(range(_TRIES)):
        try:
            if os.path.lexists(root):
                remove_tree(root, last=LOCK)
            return
        except OSError as error:
            if not left or error.errno not in _CHANGED:
                raise
        if lock is not None and not os.path.lexists(root / LOCK):
            lock.release()
        _await_fuse(root)


def _await_fuse(root: Path) -> None:
    """Wait while all that is left in `root` are files that libfuse has hidden.

    It renames a file that is unlinked while it is open, such as that of the lock. A RELEASE request
    after the close removes the new name, and the kernel does not wait for its answer.
    """
    until_s = time.monotonic() + _FUSE_RELEASES_WITHIN_S
    with contextlib.suppress(FileNotFoundError):
        while (names := os.listdir(root)) and time.monotonic() < until_s:
            if not all(name.startswith(".fuse_hidden") for name in names):
                return
            time.sleep(0.01)
