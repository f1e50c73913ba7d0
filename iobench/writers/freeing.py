"""Freeing: the space of large files that are replaced or removed is given back in the background.

Whoever removes the last name of a file waits until its blocks are free. On ext4 mounted with
`discard` that includes telling the device: 0.18 s per GiB where docs/decisions/0035 measured it, a
quarter of a save that replaces the one before. Unless somebody has the file open still: then it
goes when that is closed. So this module opens it before, and closes it in a thread of its own.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from iobench import linux
from iobench.units import MIB
from iobench.writers.waiting import Worker

__all__ = ["freed_later", "remove_tree", "wait"]

_LARGE = 64 * MIB  # what a smaller one costs is not worth a thread
_MOST_HELD = 64  # descriptors
_EXT = (
    0xEF53  # linux/magic.h; XFS and btrfs free in the background themselves, NFS must not be held
)


class _Freeing:
    """Descriptors of files that are removed, or are about to be: each alone keeps its file.

    A thread closes those that were let go, and ends after the last.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._size_bytes: dict[int, int] = {}  # of each file held, by descriptor
        self._let_go: list[int] = []
        self._closing_bytes = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def hold(self, path: str | Path) -> int | None:
        """Open the file; None where its space is better freed at once."""
        try:
            found = os.lstat(path)
            if found.st_size < _LARGE or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                return None
            if linux.file_system_type(path) != _EXT:
                return None
            with self._changed:  # so that a fork knows of every descriptor
                if len(self._size_bytes) >= _MOST_HELD or not self._spares(path, found.st_size):
                    return None
                fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._size_bytes[fd] = found.st_size
                return fd
        except OSError:  # it is not held then; what is wrong with it the removal itself will tell
            return None

    def _spares(self, path: str | Path, size_bytes: int) -> bool:
        """Whether the file system has room for the next save before this is freed, twice over."""
        room = os.statvfs(path)
        later = size_bytes + sum(self._size_bytes.values()) + self._closing_bytes
        return room.f_bavail * room.f_frsize >= 2 * later

    def let_go(self, fd: int) -> None:
        """Close it, in the background."""
        with self._changed:
            if fd not in self._size_bytes:  # a forked child has closed it
                return
            self._let_go.append(fd)
            if self._thread:
                return
            self._thread = Worker(target=self._close_all, name="iobench-freeing")
            try:
                self._thread.start()
                return
            except RuntimeError:  # no thread is to be had any more: the interpreter ends
                self._thread = None
        self._close_all()

    def _close_all(self) -> None:
        try:
            while (fd := self._next()) is not None:
                os.close(fd)
        except BaseException:
            self._end()
            raise

    def _next(self) -> int | None:
        """What is to be closed now; None ends the thread."""
        with self._changed:
            if not self._let_go:
                self._end()
                return None
            fd = self._let_go.pop(0)
            self._closing_bytes = self._size_bytes.pop(fd)
            return fd

    def _end(self) -> None:
        with self._changed:
            self._thread, self._closing_bytes = None, 0
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all that was let go is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def before_fork(self) -> None:
        self._changed.acquire()

    def after_fork_in_parent(self) -> None:
        self._changed.release()

    def after_fork_in_child(self) -> None:
        """A child would keep the files for as long as it lives: it closes what it has of them."""
        for fd in self._size_bytes:
            os.close(fd)
        self._begin()  # the lock is held, and the thread is the parent's


_freeing = _Freeing()
os.register_at_fork(
    before=_freeing.before_fork,
    after_in_parent=_freeing.after_fork_in_parent,
    after_in_child=_freeing.after_fork_in_child,
)


@contextmanager
def freed_later(path: str | Path) -> Iterator[None]:
    """The file at `path` loses its name inside the `with`; its space is freed soon after.

    At once where it is small, has other names, or is needed: where less than twice its size is
    free. Nothing happens to a file that keeps its name.
    """
    fd = _freeing.hold(path)
    try:
        yield
    finally:
        if fd is not None:
            _freeing.let_go(fd)


def remove_tree(directory: str | Path) -> None:
    """Remove `directory` and all in it; the space of its large files is free soon after.

    Not before the whole tree is gone: removing a name while blocks are freed waits for that. No
    link is followed: of one at `directory` the link is removed, and what it leads to stays. Raises
    OSError of the first that cannot be removed.
    """
    if os.path.islink(directory):
        os.unlink(directory)
        return
    with ExitStack() as held:
        for at, _, names in os.walk(directory):
            for name in names:
                held.enter_context(freed_later(os.path.join(at, name)))
        shutil.rmtree(directory)


def wait() -> None:
    """Wait until the space of every file that lost its name is free."""
    _freeing.wait()
