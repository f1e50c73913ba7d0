"""StockPath: where a stock function would put a file, if a writer can leave the same behind there.

Stock functions write into the file that is there: its permissions, owner, hard links and attributes
stay, and what is no regular file is written to as such. Writers make a new file and rename it.
Where that would leave something else behind, the stock function has to do it: `NotOurs`.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from iobench.errors import UsageError
from iobench.writers.base import Writer
from iobench.writers.s3_store.errors import status_of
from iobench.writers.s3_store.target import is_s3

__all__ = [
    *("NotOurs", "NotPicklable", "StockPath"),
    *("check_stock_can_load", "check_stock_can_save", "path_of", "tell"),
]

_log = logging.getLogger("iobench")
_SPARE_BYTES = 16 * 2**20  # of a file system's own books
_KINDS = {"s3": "buckets", "file": "files"}
_KEPT = ("user.", "system.posix_acl_access", "security.capability")


class NotOurs(Exception):  # noqa: N818 -- nothing went wrong
    """A call that the stock function must do; says why. Nothing was written."""


class NotPicklable(Exception):  # noqa: N818 -- never leaves the integrations
    """Pickling raised `error`, as it would in the stock function. Nothing was written."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def path_of(file: object) -> str:
    """The path that a stock function was given. Raises NotOurs for a file object."""
    if not isinstance(file, (str, os.PathLike)):
        raise NotOurs("not a path but a file object")
    path = os.fspath(file)
    if not isinstance(path, str):
        raise NotOurs("a path of bytes")
    if "\0" in path or not os.path.basename(path):
        raise NotOurs("no name of a file")
    return path


def tell(function: str, file: object, why: Exception) -> None:
    """Log that the stock function did it, and why. A file object is nobody's fallback."""
    if isinstance(file, (str, os.PathLike)):
        reason = why if isinstance(why, NotOurs) else f"{type(why).__name__}: {why}"
        _log.warning("%s(%s): done by the stock function: %s", function, os.fspath(file), reason)


def check_stock_can_save(function: str, file: object, why: Exception) -> None:
    """Raise `why` for an object of a bucket: stock functions know none. UsageError for NotOurs."""
    if path := _object(file):
        if isinstance(why, NotOurs):
            raise UsageError(f"{path}: {why}, and stock {function} writes to no buckets") from why
        raise why


def check_stock_can_load(function: str, file: object, why: Exception) -> None:
    """Raise `why` for an object of a bucket: stock functions know none, and would call it missing.

    FileNotFoundError only where the store says that there is none; UsageError for NotOurs.
    """
    path = _object(file)
    if not path:
        return
    if isinstance(why, NotOurs):
        raise UsageError(f"{path}: {why}, and stock {function} reads no buckets") from why
    if isinstance(why, OSError) and why.__cause__ is not None and status_of(why.__cause__) == 404:
        raise FileNotFoundError(errno.ENOENT, why.strerror, path) from why
    raise why


def _object(file: object) -> str:
    """The path of an object of a bucket; empty for all else."""
    path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
    return path if is_s3(path) else ""


@dataclass(frozen=True, kw_only=True)
class StockPath:
    """The file `name` in `directory`. `replaces` bytes are there, and go when it is renamed."""

    directory: str
    name: str
    replaces: int = 0

    @classmethod
    def of(cls, path: str, writer: Writer, *, stock_renames: bool) -> StockPath:
        """Where `writer` puts `path`, as the stock function would leave it.

        `stock_renames`: whether that makes a new file too, rather than write into the old one.
        Raises NotOurs.
        """
        directory, name = _parts(path, writer)
        if is_s3(path):
            return cls(directory=directory, name=name)
        if name in (".", "..") or not os.path.isdir(directory):
            raise NotOurs("its directory does not exist")
        size = _replaced_in_turn(path) if stock_renames else _replaced_in_place(path)
        if not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK | os.X_OK):
            raise NotOurs("no file can be made in its directory")
        return cls(directory=directory, name=name, replaces=size)

    @classmethod
    def of_stored(cls, path: str, writer: Writer) -> StockPath:
        """Where `writer` finds `path`. Raises NotOurs."""
        directory, name = _parts(path, writer)
        if not is_s3(path) and not os.path.isfile(path):
            raise NotOurs("no regular file is there")
        return cls(directory=directory, name=name)

    @property
    def path(self) -> str:
        """The whole path."""
        return os.path.join(self.directory, self.name)

    def check_room(self, size_bytes: int) -> None:
        """Raise NotOurs where there is room for the new file only in place of the old one."""
        if not self.replaces:
            return
        system = os.statvfs(self.directory)
        free = system.f_bavail * system.f_frsize
        if free - _SPARE_BYTES < size_bytes <= free + self.replaces:
            raise NotOurs("too little room to keep the old file until the new one is complete")


def _parts(path: str, writer: Writer) -> tuple[str, str]:
    scheme = "s3" if is_s3(path) else "file"
    if scheme not in writer.schemes:
        raise NotOurs(f"writer {writer.name} does not work on {_KINDS[scheme]}")
    directory, name = os.path.split(path)
    return directory or ".", name


def _replaced_in_turn(path: str) -> int:
    """Of a stock function that renames too: only what is no plain file is its own affair."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs("a link, or no regular file, is there")
    return 0 if found.st_nlink > 1 else found.st_size


def _replaced_in_place(path: str) -> int:
    """Bytes of the file that would be written into, if a new one can take its place."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        _check_new(path)
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs("no regular file is there")
    real = os.path.realpath(path)
    try:
        there = os.lstat(real)
    except OSError:
        raise NotOurs("a file that has no name of its own") from None
    if (there.st_dev, there.st_ino) != (found.st_dev, found.st_ino):
        raise NotOurs("a file that has no name of its own")
    if found.st_nlink > 1:
        raise NotOurs("the file there has several hard links")
    if not _like_new(found, os.stat(os.path.dirname(real))):
        raise NotOurs("the file there has an owner or permissions that a new one would not have")
    if any(name.startswith(_KEPT) for name in _attributes(real)):
        raise NotOurs("the file there has extended attributes")
    if _is_mounted(real):
        raise NotOurs("the file there is mounted")
    return found.st_size


def _check_new(path: str) -> None:
    """A link that leads nowhere yet is followed; its directory must be there."""
    if os.path.islink(path) and not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise NotOurs("a link into a directory that does not exist")


def _like_new(found: os.stat_result, directory: os.stat_result) -> bool:
    group = directory.st_gid if directory.st_mode & stat.S_ISGID else os.getegid()
    same_owner = (found.st_uid, found.st_gid) == (os.geteuid(), group)
    return same_owner and stat.S_IMODE(found.st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    """The process's umask; os.umask could only tell it by changing it for all threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise NotOurs("the umask is not known (no /proc)")


def _attributes(path: str) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError:
        return []


def _is_mounted(path: str) -> bool:
    """Whether something is mounted on the file itself, which a rename cannot replace."""
    escaped = path.replace("\\", r"\134").replace(" ", r"\040")
    escaped = escaped.replace("\t", r"\011").replace("\n", r"\012")
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return any(line.split(" ", 5)[4] == escaped for line in lines)
