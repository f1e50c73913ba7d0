"""Opens regular files alone: what else has a file's name is an error at once, never a wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from iobench.errors import TargetError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """Return what a file of this st_mode is, in words; an empty string for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file; raise OSError (ENXIO, EISDIR) that says what else has the name.

    A plain open(2) of a pipe waits for its other end, for ever if there is none. O_NONBLOCK ends
    that wait; it is cleared again, because io_uring returns EAGAIN on files that have it.
    """
    flags |= os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except BlockingIOError:  # another process has a lease, which only regular files can have
        fd = os.open(path, flags, mode)
    except OSError as error:
        # ENXIO: a socket, a pipe without a reader, a missing device. EINVAL: one with O_DIRECT.
        # EACCES: a device on a file system that is mounted with nodev, such as FUSE.
        if error.errno not in (errno.ENXIO, errno.EINVAL, errno.EACCES):
            raise
        if stat.S_ISREG(found := os.stat(path).st_mode):  # a file system without O_DIRECT
            raise
        raise _not_regular(path, found) from error
    try:
        found = os.fstat(fd).st_mode
        if not stat.S_ISREG(found):
            raise _not_regular(path, found)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _not_regular(path: str | os.PathLike[str], mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    text = f"{kind_of(mode) or 'it'}, not a regular file"
    return OSError(errno.ENXIO, text, os.fspath(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file; see `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def open_own(path: Path, flags: int, directory: int | None = None) -> int:
    """Open, or make, a file that a Checkpointer writes; links, symbolic and hard, are refused.

    Others may write to the directory of a shared project. A link there could lead to a file of
    this user, and a pipe would block the trainer. `directory` is a descriptor of its directory.
    """
    name = path if directory is None else path.name
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # ENXIO: a socket, a pipe without a reader
            raise foreign(path) from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise foreign(path)
    os.set_blocking(fd, True)  # io_uring returns EAGAIN otherwise
    return fd


def foreign(path: Path) -> TargetError:
    """Return the error of a `path` that leads somewhere else."""
    return TargetError(
        f"{path}: is a link, a special file or another user's: no Checkpointer made it; remove it"
    )
