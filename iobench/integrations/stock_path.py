"""StockPath: a path of a stock function, checked that a writer leaves the same result there.

StockCall: a call by a writer, or by the stock function where the results would differ.

Stock functions write into an existing file: its permissions, owner, hard links and attributes stay,
and pipes and devices receive the bytes. Writers create a new file and rename it. Where the result
would differ, only the stock function can save: `Unsupported`.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from iobench.environment.mounts import read_mounts
from iobench.errors import UsageError
from iobench.integrations.replacing import bypass
from iobench.writers.base import Writer
from iobench.writers.s3_store.errors import status_of
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Transfer

_log = logging.getLogger("iobench")
_SPARE_BYTES = 16 * 2**20  # for the file system's own metadata
_KINDS = {"s3": "buckets", "file": "files"}
_SPECIAL = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
_KEPT = ("user.", "system.posix_acl_access", "security.capability")


class Unsupported(Exception):  # noqa: N818 -- not an error: the stock function makes the call
    """Only the stock function can make this call; the text says why. Nothing was written."""


class NotPicklable(Exception):  # noqa: N818 -- never leaves the integrations
    """Pickling raised `error`; the stock function would raise it too. Nothing was written."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def path_of(file: object) -> str:
    """Return the path in the `file` argument of a stock function. Raises Unsupported for others."""
    if not isinstance(file, (str, os.PathLike)):
        raise Unsupported("not a path but a file object")
    path = os.fspath(file)
    if not isinstance(path, str):
        raise Unsupported("a path of bytes")
    if "\0" in path or not os.path.basename(path):
        raise Unsupported("not the name of a file")
    return path


def log_fallback(function: str, file: object, why: Exception) -> None:
    """Log that the stock function made this call, and why. Calls with file objects are not logged.

    Stock functions always handle file objects; no fallback takes place there.
    """
    if isinstance(file, (str, os.PathLike)):
        reason = why if isinstance(why, Unsupported) else f"{type(why).__name__}: {why}"
        _log.warning("%s(%s): done by the stock function: %s", function, os.fspath(file), reason)


def check_stock_can(
    doing: Literal["read", "write to"], function: str, file: object, why: Exception
) -> None:
    """Raise `why` if `file` is in a bucket, which stock functions cannot read or write.

    Raises UsageError in place of Unsupported. Stock functions would report a stored object as
    missing: FileNotFoundError is raised only if the store reports that it does not exist.
    """
    path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
    if not is_s3(path):
        return
    if isinstance(why, Unsupported):
        raise UsageError(f"{path}: {why}, and stock {function} cannot {doing} buckets") from why
    reads, cause = doing == "read", why.__cause__
    if reads and isinstance(why, OSError) and cause is not None and status_of(cause) == 404:
        raise FileNotFoundError(errno.ENOENT, why.strerror, path) from why
    raise why


class StockCall:
    """A call of a stock function that the writer makes, or else the stock function.

    This is the call of a drop-in. The stock function makes it where the writer's is Unsupported; a
    load also after any other error, so that callers get the errors that they know. The logger
    `iobench` reports that. For objects in buckets see `check_stock_can`.
    """

    falls_back: tuple[type[Exception], ...] = (Unsupported,)
    """What the description of a file raises where the stock function saves."""
    unwritten: tuple[type[Exception], ...] = ()
    """The same of the write."""
    nested = ""
    """Why calls inside this one are made by the stock functions; see `bypass`."""

    def __init__(self, function: str, file: object, stock: Callable[[], Any]) -> None:
        """`file` is the file argument. `stock` makes the call of `function` by the stock one."""
        self.function, self.file, self.stock = function, file, stock

    def save(self, prepare: Callable[[], Callable[[], Transfer]]) -> Any:
        """Save by what `prepare` returns. Raises its other errors, those of pickling and writing.

        `prepare` describes the file, and writes nothing.
        """
        try:
            with bypass(self.nested):
                write = prepare()
        except NotPicklable as why:  # stock would raise it too, after truncating the old file
            self.failed()
            raise why.error from None
        except self.falls_back as why:
            refused = why
        else:
            try:
                with bypass(self.nested):
                    self.redirected(write())
                return None
            except self.unwritten as why:
                refused = why
            except Exception:
                self.failed()
                raise
        return self._refused("write to", refused)

    def load(self, ours: Callable[[], tuple[Any, Transfer | None]]) -> Any:
        """Return what `ours` returns, which also reports how it was read, if it was."""
        try:
            with bypass(self.nested):
                found, moved = ours()
        except Exception as why:  # noqa: BLE001 -- stock loads it, or raises its own error
            refused = why
        else:
            self.redirected(moved)
            return found
        return self._refused("read", refused)

    def _refused(self, doing: Literal["read", "write to"], why: Exception) -> Any:
        try:
            check_stock_can(doing, self.function, self.file, why)
        except Exception:
            self.failed()
            raise
        return self.by_stock(doing, why)

    def redirected(self, moved: Transfer | None) -> None:
        """Note that the writer made the call."""

    def failed(self) -> None:
        """Note that neither made it."""

    def by_stock(self, doing: Literal["read", "write to"], why: Exception) -> Any:  # noqa: ARG002
        """Let the stock function make the call, and report that."""
        with bypass():
            found = self.stock()
        log_fallback(self.function, self.file, why)
        return found


@dataclass(frozen=True, kw_only=True)
class StockPath:
    """The file `name` in `directory`. `replaces`: bytes of the old file, freed by the rename."""

    directory: str
    name: str
    replaces: int = 0

    @classmethod
    def of(cls, path: str, writer: Writer, *, stock_renames: bool) -> StockPath:
        """Return the StockPath of a file to be saved by `writer`. Raises Unsupported.

        `stock_renames`: whether the stock function renames a new file too, instead of writing into
        the old one.
        """
        directory, name = _parts(path, writer)
        if is_s3(path):
            return cls(directory=directory, name=name)
        if name in (".", "..") or not os.path.isdir(directory):
            raise Unsupported("its directory does not exist")
        size = _replaced(path, stock_renames=stock_renames)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise Unsupported("no file can be created in its directory")
        return cls(directory=directory, name=name, replaces=size)

    @classmethod
    def of_stored(cls, path: str, writer: Writer) -> StockPath:
        """Return the StockPath of a file to be loaded by `writer`. Raises Unsupported."""
        directory, name = _parts(path, writer)
        if not is_s3(path) and not os.path.isfile(path):
            raise Unsupported("not a regular file")
        return cls(directory=directory, name=name)

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.name)

    def check_room(self, size_bytes: int) -> None:
        """Raise Unsupported if the new file fits only in place of the old one."""
        if not self.replaces:
            return
        system = os.statvfs(self.directory)
        free = system.f_bavail * system.f_frsize
        if free - _SPARE_BYTES < size_bytes <= free + self.replaces:
            raise Unsupported("too little space to keep the old file until the new one is complete")


def _parts(path: str, writer: Writer) -> tuple[str, str]:
    scheme = "s3" if is_s3(path) else "file"
    if scheme not in writer.schemes:
        raise Unsupported(f"writer {writer.name} does not work on {_KINDS[scheme]}")
    directory, name = os.path.split(path)
    return directory or ".", name


def _replaced(path: str, *, stock_renames: bool) -> int:
    """Return the bytes of the old file that a rename frees. Raise Unsupported if it must stay."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise Unsupported("the path is a link or not a regular file")
    if stock_renames:
        return 0 if found.st_nlink > 1 else found.st_size
    if found.st_nlink > 1:
        raise Unsupported("the old file has several hard links")
    if not os.access(path, os.W_OK, effective_ids=True):
        raise Unsupported("the old file is not writable")  # stock says so; a rename would succeed
    directory = os.stat(os.path.dirname(path) or ".")
    group = directory.st_gid if directory.st_mode & stat.S_ISGID else os.getegid()
    if (found.st_uid, found.st_gid) != (os.geteuid(), group):
        raise Unsupported("the old file has another owner than a new one")
    if found.st_mode & _SPECIAL:  # writers copy the other permissions
        raise Unsupported("the old file has a set-ID or sticky bit")
    if any(name.startswith(_KEPT) for name in _attributes(path)):
        raise Unsupported("the old file has extended attributes")
    real = os.path.realpath(path)
    if any(mount.mount_point == real for mount in read_mounts()):  # a rename fails with EBUSY
        raise Unsupported("the old file is a mount point")
    return found.st_size


def _attributes(path: str) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError:
        return []
