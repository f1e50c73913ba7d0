"""Frees the space of large files in the background after they are replaced or removed.

unlink(2) of the last name of a file waits until its blocks are free. On ext4 with the mount option
`discard` that includes the discard on the device: 0.18 s per GiB, 25% of a save that replaces an
older one (docs/decisions/0035). If the file is mapped, the end of the mapping frees its blocks
instead. So this module maps a page of the file before, and unmaps it in a background thread. A
descriptor would do too, but a forked child would have it. A thread that the interpreter's end stops
leaves the rest to the kernel.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iobench import linux
from iobench.units import MIB

_LARGE = 64 * MIB  # freeing a smaller file costs too little for a thread
# linux/magic.h. XFS and btrfs free in the background themselves. On NFS a removed file that is open
# is renamed, not removed.
_EXT = 0xEF53
_THREAD = "iobench-deferred-free"

_held: list[tuple[int, int]] = []
"""The address of each mapping, and the bytes of its file, until it is unmapped."""
_due: deque[tuple[int, int]] = deque()
"""Those to unmap. One that an interrupted call leaves here is unmapped by the next call."""


@contextmanager
def freed_later(paths: Iterable[str | Path]) -> Iterator[None]:
    """Free the space of files in the background that lose their names inside the `with`.

    The space is freed at once if the file is small, has other names, or if less than twice its size
    is free, or if no thread starts. A file that keeps its name does not change.
    """
    held: list[tuple[int, int]] = []
    try:
        for path in paths:
            try:
                _hold(path, held)
            except OSError:  # not held then; if something is wrong, the removal raises
                continue
        yield
    finally:
        if held or _due:
            _due.extend(one for one in held if one in _held)  # none in a forked child
            thread = threading.Thread(target=_unmap_due, name=_THREAD, daemon=True)
            try:
                with suppress(RuntimeError):  # no thread can be started any more
                    thread.start()
            finally:
                if thread.ident is None:
                    _unmap_due()


def wait() -> None:
    """Wait until the space of every file that lost its name is free."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()
    _unmap_due()


def _hold(path: str | Path, held: list[tuple[int, int]]) -> None:
    """Map a page of the file and add it to `held`, unless to free it at once is better."""
    found = os.lstat(path)
    if found.st_size < _LARGE or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        return
    if linux.file_system_type(path) != _EXT:
        return
    space = os.statvfs(path)
    later = found.st_size + sum(size for _, size in list(_held))
    if space.f_bavail * space.f_frsize < 2 * later:
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        address = linux.map_memory(None, linux.PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    finally:
        os.close(fd)
    held.append((address, found.st_size))
    _held.append(held[-1])
    linux.keep_from_children(address, linux.PAGE)


def _unmap_due() -> None:
    with suppress(IndexError):
        while True:
            mapping = _due.popleft()
            linux.unmap_memory(mapping[0], linux.PAGE)  # without the GIL: this takes long
            _held.remove(mapping)


def _forget() -> None:
    """A forked child has none of the mappings."""
    _held.clear()
    _due.clear()


os.register_at_fork(after_in_child=_forget)
