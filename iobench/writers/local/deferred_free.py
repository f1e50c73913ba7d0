"""Frees the space of large files in the background after they are replaced or removed.

unlink(2) of the last name of a file waits until its blocks are free. On ext4 with the mount option
`discard` that includes the discard on the device: 0.18 s per GiB, 25% of a save that replaces an
older one (docs/decisions/0035). If the file is still open, its blocks are freed by the last close
instead. So this module opens the file before, and closes it in a background thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from iobench import linux
from iobench.units import MIB
from iobench.writers.blocks.channel import Channel, Lease, LeaseState

__all__ = ["freed_later", "remove_tree", "wait"]

_TRIES = 1000  # each finds fewer entries
_LARGE = 64 * MIB  # freeing a smaller file costs too little for a thread
_MOST_HELD = 64  # descriptors
# linux/magic.h. XFS and btrfs free in the background themselves. On NFS a removed file that is open
# is renamed, not removed.
_EXT = 0xEF53


class _Held:
    """An open descriptor, which alone keeps a file that is removed or is about to be."""

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd, self.size_bytes = fd, found.st_size
        self._file = found.st_dev, found.st_ino

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, unless the parent had closed it at the fork.

        The number may then be that of another file, with the same inode number too: but only this
        module holds a file by O_PATH.
        """
        with suppress(OSError):
            found = os.fstat(self.fd)
            by_path = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_PATH
            if by_path and (found.st_dev, found.st_ino) == self._file:
                os.close(self.fd)


class _DeferredFree:
    """The files that are held open, and a background thread that closes them."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._open: dict[_Held, None] = {}
        self._closing: dict[_Held, None] = {}
        self._lock = threading.RLock()  # a signal handler that saves may run while it is held
        self._channel: Channel[_Held] = Channel(
            lambda: self._channel.serve(self._close),
            name="iobench-deferred-free",
            limit=4 * _MOST_HELD,
            lingers=False,
            daemon=False,
        )

    def hold(self, path: str | Path) -> _Held | None:
        """Open the file; return None if its space should be freed at once."""
        try:
            found = os.lstat(path)
            if found.st_size < _LARGE or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                return None
            if linux.file_system_type(path) != _EXT:
                return None
            with self._lock:  # a forked child must find every descriptor
                if len(self._open) >= _MOST_HELD or not self._has_room(path, found.st_size):
                    return None
                fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                held = _Held(fd)
                self._open[held] = None
                return held
        except OSError:  # not held then; if something is wrong, the removal itself raises
            return None

    def _has_room(self, path: str | Path, size_bytes: int) -> bool:
        """Whether at least twice the size of this file and all held files is free."""
        room = os.statvfs(path)
        later = size_bytes + sum(held.size_bytes for held in (*self._open, *self._closing))
        return room.f_bavail * room.f_frsize >= 2 * later

    def close_later(self, held: _Held) -> None:
        """Close the file in the background, or here if no thread starts or on an interrupt."""
        if held not in self._open:  # closed in a forked child
            return
        lease = Lease(held)
        try:
            self._channel.submit(lease)
        except RuntimeError:  # no thread can be started any more
            pass
        finally:
            if lease.state is LeaseState.HELD:
                self._close(held)

    def _close(self, held: _Held) -> None:
        with self._lock:
            self._closing[held] = None
            self._open.pop(held)
        os.close(held.fd)  # without the lock, for which a fork waits: this takes long
        self._closing.pop(held)

    def wait(self) -> None:
        """Wait until every file that `close_later` took is closed."""
        self._channel.drain()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Close the inherited descriptors, which would keep the files while the child lives."""
        for held in (*self._open, *self._closing):
            held.close_in_child()
        self._begin()  # a new lock, as the old one is held, and a new channel


_deferred = _DeferredFree()
os.register_at_fork(
    before=_deferred.before_fork,
    after_in_parent=_deferred.after_fork_in_parent,
    after_in_child=_deferred.after_fork_in_child,
)


@contextmanager
def freed_later(path: str | Path) -> Iterator[None]:
    """Free the space of a file in the background that loses its name inside the `with`.

    The space is freed at once if the file is small, has other names, or if less than twice its size
    is free. A file that keeps its name does not change.
    """
    held = _deferred.hold(path)
    try:
        yield
    finally:
        if held is not None:
            _deferred.close_later(held)


def remove_tree(directory: str | Path) -> None:
    """Remove `directory` and its content; free the space of large files in the background.

    Freeing starts when the whole tree is removed, as unlink waits while blocks are freed. Links are
    not followed: a link at `directory` is removed, and its destination stays. What another process
    removes at the same time is not an error. Raises the OSError of the first entry that cannot be
    removed.
    """
    if os.path.islink(directory):
        os.unlink(directory)
        return
    existed = os.path.lexists(directory)
    with ExitStack() as held:
        for path in _files_below(directory):
            if (file := _deferred.hold(path)) is not None:
                held.callback(_deferred.close_later, file)
        for left in reversed(range(_TRIES)):
            try:
                _unlink_files(directory)
                shutil.rmtree(directory)
                return
            except FileNotFoundError:
                # Ranks remove their files of a failed save while rank 0 removes the directory.
                if existed and not os.path.lexists(directory):
                    return
                if not (existed and left):
                    raise


def _files_below(directory: str | Path) -> Iterator[str]:
    """Yield the paths of all entries below that are not directories; there may be 100,000."""
    inner = []
    with suppress(OSError), os.scandir(directory) as entries:  # the removal itself raises
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.path)
            else:
                yield entry.path
    for path in inner:
        yield from _files_below(path)


def _unlink_files(directory: str | Path) -> None:
    """Unlink the files of `directory` while it is read: rmtree takes 16 MiB to list 100,000 first.

    A file system that leaves out entries then leaves them to rmtree. Entries are unlinked in the
    directory that was opened, which is not a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(NotADirectoryError), ExitStack() as opened:  # rmtree raises this error
        fd = os.open(directory, flags)
        opened.callback(os.close, fd)
        for entry in opened.enter_context(os.scandir(fd)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=fd)


def wait() -> None:
    """Wait until the space of every file that lost its name is free."""
    _deferred.wait()
