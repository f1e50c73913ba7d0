"""Frees the space of large files in the background after they are replaced or removed.

unlink(2) of the last name of a file waits until its blocks are free. On ext4 with the mount option
`discard` that includes the discard on the device: 0.18 s per GiB, 25% of a save that replaces an
older one (docs/decisions/0035). If the file is still open, its blocks are freed by the last close
instead. So this module opens the file before, and closes it in a background thread. A thread that
the interpreter's end stops leaves the close to the kernel.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from iobench import linux
from iobench.units import MIB

_LARGE = 64 * MIB  # freeing a smaller file costs too little for a thread
_MOST_HELD = 64  # descriptors
# linux/magic.h. XFS and btrfs free in the background themselves. On NFS a removed file that is open
# is renamed, not removed.
_EXT = 0xEF53
_THREAD = "iobench-deferred-free"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldFile:
    """A descriptor that keeps a file which is removed or is about to be."""

    fd: int
    size_bytes: int


_held: set[HeldFile] = set()
"""All of them, until they are closed."""
_due: deque[HeldFile] = deque()
"""Those to close. One that an interrupted call leaves here is closed by the next call."""
_lock = threading.RLock()  # a signal handler that saves may run while it is held


@contextmanager
def freed_later(path: str | Path) -> Iterator[None]:
    """Free the space of a file in the background that loses its name inside the `with`.

    The space is freed at once if the file is small, has other names, or if less than twice its size
    is free. A file that keeps its name does not change.
    """
    held = hold(path)
    try:
        yield
    finally:
        free_later([held] if held else [])


def free_later(files: Sequence[HeldFile]) -> None:
    """Close the files in the background, or here if no thread starts or on an interrupt."""
    _due.extend(held for held in files if held in _held)  # none in a child that was forked since
    if not _due:
        return
    thread = threading.Thread(target=_close_due, name=_THREAD, daemon=True)
    try:
        with suppress(RuntimeError):  # no thread can be started any more
            thread.start()
    finally:
        if thread.ident is None:
            _close_due()


def wait() -> None:
    """Wait until the space of every file that lost its name is free."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()
    _close_due()


def hold(path: str | Path) -> HeldFile | None:
    """Open a file for `free_later`; return None if its space should be freed at once."""
    try:
        found = os.lstat(path)
        if found.st_size < _LARGE or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            return None
        if linux.file_system_type(path) != _EXT:
            return None
        with _lock:  # a forked child must find every descriptor
            space = os.statvfs(path)
            later = found.st_size + sum(one.size_bytes for one in list(_held))
            if len(_held) >= _MOST_HELD or space.f_bavail * space.f_frsize < 2 * later:
                return None
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            held = HeldFile(fd=fd, size_bytes=os.fstat(fd).st_size)
            _held.add(held)
            return held
    except OSError:  # not held then; if something is wrong, the removal itself raises
        return None


def _close_due() -> None:
    with suppress(IndexError):
        while True:
            held = _due.popleft()
            os.close(held.fd)  # without the lock, for which a fork waits: this takes long
            _held.discard(held)


def _after_fork_in_child() -> None:
    """Close the inherited descriptors, which would keep the files while the child lives.

    The parent may have closed one already. Its number may then be that of another file, but only
    this module opens files by O_PATH.
    """
    for held in _held:
        with suppress(OSError):
            if fcntl.fcntl(held.fd, fcntl.F_GETFL) & os.O_PATH:
                os.close(held.fd)
    _held.clear()
    _due.clear()
    _lock.release()


os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_after_fork_in_child,
)
