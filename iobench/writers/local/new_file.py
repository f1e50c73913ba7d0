"""NewFile: a file written beside its name and published whole. ProbeFile: one to try with."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

from iobench import linux
from iobench.errors import DataMismatchError, TransferError
from iobench.writers.availability import Availability
from iobench.writers.local.deferred_free import freed_later
from iobench.writers.local.file_metadata import (
    check_replaceable,
    set_permissions,
    standing,
    take_after,
)
from iobench.writers.transfer import Meter

__all__ = [
    *("PART_SUFFIX", "NewFile", "ProbeFile"),
    *("missing_directories", "open_source", "sync_directory", "try_directory", "write_text"),
]

PART_SUFFIX = ".iobench-part"
"""Ends the name of a file that is being written; what a killed process leaves bears it."""

_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR}


_unsynced: set[str] = set()
"""Directories made here whose names may not be durable yet: whoever writes below makes them so."""


def sync_directory(directory: str | Path) -> None:
    """Make the names in `directory` durable."""
    path = os.path.abspath(directory)
    made = [name for name in tuple(_unsynced) if os.path.dirname(name) == path]
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    _unsynced.difference_update(made)


def missing_directories(directory: str | os.PathLike[str]) -> list[str]:
    """Of `directory` and those above it what is not there, from the root; the highest first."""
    path = os.fspath(directory)
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing[::-1]


def _make_parents(directory: str) -> None:
    """Make `directory` and those above it; their names are not durable yet."""
    for path in missing_directories(os.path.normpath(directory)):
        _unsynced.add(path)  # before: another thread may write into it at once
        try:
            os.mkdir(path)
        except FileExistsError:  # another thread made it meanwhile
            if not os.path.isdir(path):
                raise
        _unsynced.add(path)  # the directory above may have been synced in between


def _with_unsynced_above(directory: str) -> list[str]:
    """`directory`, and those above it that gained a name which is not durable yet."""
    found = [directory]
    if _unsynced:
        path = Path(os.path.normpath(directory))
        found += [str(made.parent) for made in (path, *path.parents) if str(made) in _unsynced]
    return found


def _make(path: str, flags: int, mode: int) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, mode)


class NewFile:
    """A file under a temporary name in its directory until `publish` gives it its own.

    As a context manager: left before `publish`, it is removed and the name keeps what it had.
    A process killed in between leaves only a hidden `.NAME.*.iobench-part`. Owner, group,
    permissions and attributes are those of the file that is replaced, as far as this process may
    set them.
    """

    def __init__(self, path: str | Path, flags: int, meter: Meter) -> None:
        """Open for writing with `flags` besides (O_DIRECT). Raises OSError of the open as it is.

        TargetError for a name that is no regular file's: it would be one afterwards.
        """
        self.path, self._old = standing(path)
        directory, name = os.path.split(self.path)
        self._meter = meter
        with meter.phase("open"):
            self.part = os.path.join(directory, f".{name[:40]}.{secrets.token_hex(6)}{PART_SUFFIX}")
            self.fd = self._open(directory, flags)
        self._live, self._pid = True, os.getpid()
        self._reserved = False
        self._permissions: int | None = None
        if self._old is not None:
            try:
                self._permissions = take_after(self.fd, self.path, self._old, meter)
            except BaseException:
                self.abandon()
                raise

    def _open(self, directory: str, flags: int) -> int:
        check_replaceable(self.path, self._old)
        mode = 0o666 if self._old is None else self._old.st_mode & 0o666  # never more open
        try:
            try:
                return _make(self.part, flags, mode)
            except FileNotFoundError:
                _make_parents(directory)
                return _make(self.part, flags, mode)
        except OSError:  # a refused O_DIRECT may have made the file all the same
            Path(self.part).unlink(missing_ok=True)
            raise

    @property
    def directories(self) -> list[str]:
        """What to sync for the file's name to be durable: its own directory first.

        Those above it gained a name that is not durable yet, whoever made it.
        """
        return _with_unsynced_above(os.path.dirname(self.path))

    def reserve(self, start: int, stop: int) -> None:
        """Reserve blocks for bytes [start, stop). Recorded as a fallback where it cannot be."""
        if stop <= start:
            return
        with self._meter.phase("open"):
            try:
                linux.fallocate(self.fd, start, stop - start)
                self._reserved = True
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise TransferError.wrap(error, "reserving space", self.path) from error
                self._meter.fell_back("fallocate", "none", f"{error.strerror} by the file system")

    def set_size(self, size_bytes: int) -> None:
        """Make the file exactly `size_bytes` long, whatever was padded or reserved beyond.

        Proved by looking: s3fs says yes to ftruncate and does nothing while it holds data that is
        not stored yet, so that is synced first there, which is a recorded fallback.
        """
        try:
            if self._reserved or os.fstat(self.fd).st_size != size_bytes:
                os.ftruncate(self.fd, size_bytes)
                if os.fstat(self.fd).st_size != size_bytes:
                    os.fsync(self.fd)
                    os.ftruncate(self.fd, size_bytes)
                    self._meter.fell_back("ftruncate", "fsync before it", "it did nothing")
                    self._prove_size(size_bytes)
        except OSError as error:
            raise TransferError.wrap(error, "setting the size of", self.path) from error

    def _prove_size(self, size_bytes: int) -> None:
        found = os.fstat(self.fd).st_size
        if found != size_bytes:
            raise TransferError(
                errno.EIO, f"has {found} bytes after ftruncate to {size_bytes}", self.path
            )

    def sync(self, meter: Meter | None = None) -> None:
        """Make the bytes durable (fsync), under the temporary name still. `meter` is timed."""
        with (meter or self._meter).phase("sync"):
            try:
                os.fsync(self.fd)
            except OSError as error:
                raise TransferError.wrap(error, "syncing", self.path) from error

    def publish(self, *, sync_names: bool) -> None:
        """Close the file and give it its name; with `sync_names` make the name durable.

        Raises TransferError. When only the last sync failed, the whole file has its name already,
        but may lose it in a crash.
        """
        with self._meter.phase("commit"), freed_later(self.path):
            try:
                if self._permissions is not None:
                    set_permissions(self.fd, self._permissions, self._meter)
                self._close()
                os.replace(self.part, self.path)
                self._live = False
                if sync_names:
                    for directory in self.directories:
                        sync_directory(directory)
            except OSError as error:
                self.abandon()
                raise TransferError.wrap(error, "publishing", self.path) from error

    def abandon(self) -> None:
        """Close and remove the temporary file, if it is still there.

        A forked child only closes its descriptor: the file is its parent's. Raises nothing that
        would hide why: what cannot be removed is told in a note on the error that is propagating,
        or as a ResourceWarning.
        """
        if not self._live:
            return
        self._live = False
        with contextlib.suppress(OSError):  # the bytes are not wanted any more
            self._close()
        if self.part and os.getpid() == self._pid:
            self._unlink()

    def _unlink(self) -> None:
        try:
            os.unlink(self.part)
        except FileNotFoundError:  # its directory was removed
            pass
        except OSError as error:
            left = f"{self.part}: cannot be removed ({error.strerror}) and is left behind"
            if error.__context__ is not None:
                error.__context__.add_note(left)
            else:
                warnings.warn(left, ResourceWarning, stacklevel=2)

    def _close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


class ProbeFile(NewFile):
    """A file to try a path with, never published.

    It has no name where the file system has files without (O_TMPFILE), so that a process killed
    meanwhile leaves nothing; elsewhere it is a NewFile as any other.
    """

    def _open(self, directory: str, flags: int) -> int:
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            return super()._open(directory, flags)
        self.part = ""
        return fd


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all; durable on return. Raises OSError.

    The text is written under a name that cannot be foreseen and must be free: where others may
    write to the directory, a link of theirs at a known name would lead elsewhere.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with aside.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def open_source(path: str | Path, flags: int, size_bytes: int) -> int:
    """A descriptor to read the file of exactly `size_bytes`; raises DataMismatchError otherwise."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        if flags & os.O_DIRECT and error.errno == errno.EINVAL:
            raise  # for the writer: O_DIRECT refused
        raise TransferError.wrap(error, "opening", path) from error
    found = os.fstat(fd).st_size
    if found != size_bytes:
        os.close(fd)
        raise DataMismatchError(f"{path}: has {found} bytes, its image has {size_bytes}")
    return fd


def try_directory(target: str | Path) -> Availability:
    """Whether files can be made in the directory `target`, found by making one."""
    try:
        with tempfile.TemporaryFile(dir=target):
            return Availability(ok=True)
    except OSError as error:
        return Availability(
            ok=False,
            reason=f"{target}: {error.strerror or error}.",
            remedy="Name a directory that exists and may be written.",
        )
