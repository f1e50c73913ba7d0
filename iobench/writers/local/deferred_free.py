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
from iobench.writers.blocks.channel import Channel, Lease, LeaseState

__all__ = ["freed_later", "remove_tree", "wait"]

_LARGE = 64 * MIB  # what a smaller one costs is not worth a thread
_MOST_HELD = 64  # descriptors
_EXT = (
    0xEF53  # linux/magic.h; XFS and btrfs free in the background themselves, NFS must not be held
)


class _Held:
    """An open descriptor that alone keeps a file which is removed, or is about to be."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd, self.size_bytes = fd, size_bytes


class _Freeing:
    """The files that are held, and a thread that closes those that were let go."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._open: dict[_Held, None] = {}
        self._closing: dict[_Held, None] = {}
        self._lock = threading.RLock()  # a signal handler that saves comes in while it is held
        self._channel: Channel[_Held] = Channel(
            lambda: self._channel.serve(self._close),
            name="iobench-freeing",
            limit=4 * _MOST_HELD,
            lingers=False,
            daemon=False,
        )

    def hold(self, path: str | Path) -> _Held | None:
        """Open the file; None where its space is better freed at once."""
        try:
            found = os.lstat(path)
            if found.st_size < _LARGE or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                return None
            if linux.file_system_type(path) != _EXT:
                return None
            with self._lock:  # so that a fork knows of every descriptor
                if len(self._open) >= _MOST_HELD or not self._spares(path, found.st_size):
                    return None
                fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                held = _Held(fd, found.st_size)
                self._open[held] = None
                return held
        except OSError:  # it is not held then; what is wrong with it the removal itself will tell
            return None

    def _spares(self, path: str | Path, size_bytes: int) -> bool:
        """Whether the file system has room for the next save before this is freed, twice over."""
        room = os.statvfs(path)
        later = size_bytes + sum(held.size_bytes for held in (*self._open, *self._closing))
        return room.f_bavail * room.f_frsize >= 2 * later

    def let_go(self, held: _Held) -> None:
        """Close it, in the background; here if no thread can be started, or that is interrupted."""
        if held not in self._open:  # a forked child has closed it
            return
        lease = Lease(held)
        try:
            self._channel.submit(lease)
        except RuntimeError:  # no thread is to be had any more
            pass
        finally:
            if lease.state is LeaseState.HELD:
                self._close(held)

    def _close(self, held: _Held) -> None:
        with self._lock:  # a child forked from here on leaves the number alone
            self._closing[held] = None
            self._open.pop(held)
        os.close(held.fd)
        self._closing.pop(held)

    def wait(self) -> None:
        """Wait until all that was let go is closed."""
        self._channel.drain()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """A child would keep the files for as long as it lives: it closes what it has of them."""
        for held in self._open:
            os.close(held.fd)
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
    held = _freeing.hold(path)
    try:
        yield
    finally:
        if held is not None:
            _freeing.let_go(held)


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
