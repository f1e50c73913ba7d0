"""reusing: a new file takes over the space of a file that is not needed any more.

A file system that allocates blocks, and a device that allocates them again after a discard, take
time for it: on tmpfs more than the copy of the bytes (docs/decisions/0063).

The old file keeps its inode. So it must be a file that no process uses: whoever has it open, or has
mapped it, would find the new bytes in it. A write lease says that (fcntl(2), F_SETLEASE): the
kernel grants it only while no other descriptor or mapping exists. Before the lease the file gets a
name that no other process knows, so that it cannot be opened between lease and overwrite. The
kernel knows the descriptors of this machine alone, so that only local file systems are used.
Clients of an NFS server on this machine hold no descriptor: docs/checkpointer.md says to leave
`reuse_files` off there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench import linux

_LOCAL = {0xEF53, 0x58465342, linux.TMPFS}
"""ext4, XFS and tmpfs (linux/magic.h). btrfs writes to new blocks in any case."""

_spares: dict[str, str] = {}
"""The path of a file that is about to be written, and the file whose space it takes over."""


@contextmanager
def reusing(directory: str | Path, spare: str | Path | None, name: str) -> Iterator[None]:
    """Let the file `name` that is made in `directory` take over that of this name in `spare`.

    It is as durable and as whole as any other new file. Nothing happens without such a file, if it
    is used by a process, has another name, or has other permissions than the new one.
    """
    if not spare:
        yield
        return
    path = os.path.join(directory, name)
    _spares[path] = os.path.join(spare, name)
    try:
        yield
    finally:
        _spares.pop(path, None)


def with_space_of_spare(path: str, part: str, fd: int, flags: int) -> int:
    """Replace the new and empty file `part`, open as `fd`, by the spare of `path`, if it has one.

    Returns the descriptor of `part`, opened with the same `flags`.
    """
    spare = _spares.pop(path, None)
    if spare is None:
        return fd
    directory, name = os.path.split(part)
    hidden = os.path.join(directory, f".{name}")
    try:
        os.rename(spare, hidden)
    except OSError:  # there is none; the new file is as good
        return fd
    old = -1
    try:
        old = os.open(hidden, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
        if _is_replacement(old, fd) and _is_unused(old):
            os.rename(hidden, part)
            old, fd = fd, old
            return fd
    except OSError:
        pass
    finally:
        if old >= 0:
            os.close(old)
    try:
        os.rename(hidden, spare)
    except OSError:  # the directory of the spare is gone
        os.unlink(hidden)
    return fd


def _is_replacement(spare: int, new: int) -> bool:
    """Whether `spare` can be `new`: it has the same owner, permissions and attributes."""
    one, other = os.fstat(spare), os.fstat(new)
    if not stat.S_ISREG(one.st_mode) or one.st_nlink != 1:
        return False
    if linux.file_system_type(f"/proc/self/fd/{spare}") not in _LOCAL:
        return False
    kept = [(s.st_dev, s.st_mode, s.st_uid, s.st_gid) for s in (one, other)]
    return kept[0] == kept[1] and _attributes(spare) == _attributes(new)


def _attributes(fd: int) -> dict[str, bytes]:
    return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}


def _is_unused(fd: int) -> bool:
    """Whether no process but this one has the file open or mapped, and this one only as `fd`."""
    # Whoever opens it during the lease sends this process a signal: one that is ignored by default.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    with contextlib.suppress(BlockingIOError):
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    return False
