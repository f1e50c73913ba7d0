"""NewFile: written under a temporary name and published whole.

A new file keeps the metadata of the file that it replaces.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Self

from iobench import linux
from iobench.errors import DataMismatchError, TargetError, TransferError, transfer_errors
from iobench.regular_file import kind_of, open_regular
from iobench.writers.base import Availability
from iobench.writers.local.deferred_free import freed_later
from iobench.writers.transfer import Meter

PART_SUFFIX = ".iobench-part"
"""The suffix of a temporary name. A killed process leaves files with this suffix."""

_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

_unsynced: set[str] = set()
"""New directories whose names may not be durable yet. Every writer below them syncs those names."""


def sync_directory(directory: str | Path) -> None:
    """Make the names in `directory` durable."""
    path = os.path.abspath(directory)
    made = [name for name in list(_unsynced) if os.path.dirname(name) == path]
    linux.sync_file(directory, os.O_DIRECTORY)
    _unsynced.difference_update(made)


def missing_directories(directory: str | os.PathLike[str]) -> list[str]:
    """Return `directory` and its parents that do not exist as absolute paths, the highest first."""
    path = os.fspath(directory)
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing[::-1]


def make_directories(directory: str | os.PathLike[str]) -> None:
    """Make `directory` and its parents if they are missing; their names are durable on return."""
    missing = missing_directories(directory)
    os.makedirs(directory, exist_ok=True)
    for path in missing:
        sync_directory(os.path.dirname(path))


def _make_parents(directory: str) -> None:
    """Make `directory` and its parents; their names are not durable yet."""
    for path in missing_directories(os.path.normpath(directory)):
        _unsynced.add(path)  # before: another thread may write into it at once
        try:
            os.mkdir(path)
        except FileExistsError:  # another thread made it
            if not os.path.isdir(path):
                raise
        _unsynced.add(path)  # another thread may have synced the parent since


def _with_unsynced_above(directory: str) -> list[str]:
    """Return `directory` and its parents that hold a name which is not durable yet."""
    found = [directory]
    if _unsynced:
        path = Path(os.path.normpath(directory))
        found += [str(made.parent) for made in (path, *path.parents) if str(made) in _unsynced]
    return found


def reserve_blocks(fd: int, start: int, stop: int) -> str:
    """Reserve blocks for bytes [start, stop). Return why the file system cannot do that, or ""."""
    try:
        linux.fallocate(fd, start, stop - start)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        return os.strerror(error.errno)
    return ""


def _make(path: str, mode: int) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)


class NewFile:
    """A file under a temporary name in its directory, until `publish` gives it its final name.

    The end of a `with` before `publish` removes the file, and the name keeps what it had. A killed
    process leaves only a hidden `.NAME.*.iobench-part`. Owner, group, permissions and attributes
    are those of the file that is replaced, as far as this process may set them.
    """

    def __init__(self, path: str | Path, meter: Meter) -> None:
        """Open for writing. Raises the OSError of the open.

        Raises TargetError if the name exists and is not a regular file: it would be replaced.
        """
        self.path, self._old = existing_file(path)
        directory, name = os.path.split(self.path)
        self.meter = meter
        """Counts what is done to the file; to be used by one thread at a time."""
        with meter.phase("open"):
            self.part = os.path.join(directory, f".{name[:40]}.{secrets.token_hex(6)}{PART_SUFFIX}")
            self.fd = self._open(directory)
        self._live, self._pid = True, os.getpid()
        self._reserved = False
        self._permissions: int | None = None
        if self._old is not None:
            try:
                self._permissions = copy_metadata(self.fd, self.path, self._old, meter)
            except BaseException:
                self.abandon()
                raise

    def _open(self, directory: str) -> int:
        check_replaceable(self.path, self._old)
        mode = 0o666 if self._old is None else self._old.st_mode & 0o666  # never wider than before
        try:
            return _make(self.part, mode)
        except FileNotFoundError:
            _make_parents(directory)
            return _make(self.part, mode)

    @property
    def directories(self) -> list[str]:
        """The directories whose sync makes the name of the file durable: its own one first.

        The others are its parents that hold a name which is not durable yet.
        """
        return _with_unsynced_above(os.path.dirname(self.path))

    def reserve(self, start: int, stop: int) -> None:
        """Reserve blocks for bytes [start, stop). Without fallocate(2) record a fallback."""
        if stop <= start:
            return
        with self.meter.phase("open"), transfer_errors("reserving space", self.path):
            refusal = reserve_blocks(self.fd, start, stop)
            self._reserved = self._reserved or not refusal
            if refusal:
                self.meter.fell_back("fallocate", "none", f"{refusal} by the file system")

    def set_size(self, size_bytes: int) -> None:
        """Make the file exactly `size_bytes` long; padding and reserved space are cut off.

        The size is checked afterwards: on s3fs ftruncate succeeds but does nothing while it holds
        data that is not stored yet. In that case sync, repeat ftruncate and record a fallback.
        """
        with self.meter.phase("commit"), transfer_errors("setting the size of", self.path):
            if self._reserved or os.fstat(self.fd).st_size != size_bytes:
                os.ftruncate(self.fd, size_bytes)
                if os.fstat(self.fd).st_size != size_bytes:
                    os.fsync(self.fd)
                    os.ftruncate(self.fd, size_bytes)
                    self.meter.fell_back("ftruncate", "fsync before it", "it did nothing")
                    if (found := os.fstat(self.fd).st_size) != size_bytes:
                        text = f"has {found} bytes after ftruncate to {size_bytes}"
                        raise TransferError(errno.EIO, text, self.path)

    def sync(self, meter: Meter | None = None) -> None:
        """Make the bytes durable (fsync), still under the temporary name; `meter` is timed."""
        with (meter or self.meter).operation("sync"), transfer_errors("syncing", self.path):
            os.fsync(self.fd)

    def publish(self, *, sync_names: bool) -> None:
        """Close the file and give it its final name; with `sync_names` make the name durable.

        Raises TransferError. If only the last sync failed, the whole file has its name already, but
        may lose it in a crash.
        """
        with self.meter.phase("commit"), freed_later([self.path]):
            try:
                if self._permissions is not None:
                    set_permissions(self.fd, self._permissions, self.meter)
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
        """Close and remove the temporary file, unless it is published or removed.

        A forked child only closes its descriptor, as the parent owns the file. Raises nothing, to
        keep the error that is propagating: a file that cannot be removed is reported in a note on
        that error, or as a ResourceWarning.
        """
        if not self._live:
            return
        self._live = False
        with contextlib.suppress(OSError):  # the bytes are not needed any more
            self._close()
        if os.getpid() == self._pid:
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

    def __exit__(self, *_: object) -> None:
        self.abandon()


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, like `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all; durable on return. Raises OSError.

    The data are first written under a random name that must not exist. With a known name, another
    user of the directory could place a link there that leads elsewhere.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with part.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def open_source(path: str | Path, size_bytes: int) -> int:
    """Open a file for reading. Raises DataMismatchError unless it has exactly `size_bytes`."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise TransferError.wrap(error, "opening", path) from error
    found = os.fstat(fd).st_size
    if found != size_bytes:
        os.close(fd)
        raise DataMismatchError(f"{path}: has {found} bytes, its image has {size_bytes}")
    return fd


def try_directory(target: str | Path) -> Availability:
    """Make a file in the directory `target` to check that this is possible."""
    try:
        with tempfile.TemporaryFile(dir=target):
            return Availability(ok=True)
    except OSError as error:
        return Availability(
            ok=False,
            reason=f"{target}: {error.strerror or error}.",
            remedy="Name a directory that exists and is writable.",
        )


_READ_WRITE = stat.S_IRUSR | stat.S_IWUSR
_PERMISSIONS = 0o777  # without set-user-ID: the kernel clears it on a write too

_ATTRIBUTES = ("user.", "system.posix_acl_access")  # the kernel sets the others

_NOT_PERMITTED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""The process has no right to set owner, permissions or attributes, or the file system has none."""


def existing_file(path: str | os.PathLike[str]) -> tuple[str, os.stat_result | None]:
    """Return `path` as an absolute path, and the stat result of the file there, or None.

    The absolute path stays valid when the process changes its directory. A link at `path` is
    followed by stat(2): the kernel refuses a link that another user made in a sticky directory
    (fs.protected_symlinks), and readlink(2) alone would bypass that. Links in the directories above
    are not resolved: a path through them works too, and resolving costs more than writing a small
    file. Raises OSError if stat fails.
    """
    path = os.fspath(path)
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    path = "/" + path.lstrip("/")  # normpath keeps two slashes: a second name of each directory
    if ".." in path:
        _stat(os.stat, path)
        path = os.path.realpath(path)
    found = _stat(os.lstat, path)
    if found is not None and stat.S_ISLNK(found.st_mode):
        found = _stat(os.stat, path)
        path = os.path.realpath(path)
    return path, found


def _stat(how: Callable[[str], os.stat_result], path: str) -> os.stat_result | None:
    """Return None for a name that is free; raise every other error, as a file may exist there."""
    try:
        return how(path)
    except FileNotFoundError:
        return None


def check_replaceable(path: str, old: os.stat_result | None) -> None:
    """Raise TargetError unless `path` is free or a regular file: a writer would replace it."""
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise TargetError(
            f"{path}: is {kind_of(old.st_mode)}, which a writer would replace by a file; "
            "name a file, or a new one"
        )


def copy_metadata(fd: int, path: str | Path, old: os.stat_result, meter: Meter) -> int:
    """Copy owner, group, attributes and permissions of the `old` file at `path` to the new one.

    A refusal is recorded as a fallback. Returns the permissions to set at the end. Until then the
    owner may read and write the file, as some writers open it a second time.
    """
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        refused = copy_owner(fd, old)
        if refused is not None:
            wanted, used = f"owner {old.st_uid}", f"owner {new.st_uid}"
            meter.fell_back(wanted, used, refused.strerror or str(refused))
    _copy_attributes(fd, path, meter)
    permissions = old.st_mode & _PERMISSIONS
    set_permissions(fd, permissions | _READ_WRITE, meter)
    return permissions


def _copy_attributes(fd: int, path: str | Path, meter: Meter) -> None:
    """Copy the user attributes and the access control list of the file at `path`."""
    try:
        names = os.listxattr(path)
    except OSError as error:
        if error.errno not in {*_NOT_PERMITTED, errno.ENOENT}:
            raise
        return
    for name in names:
        if name.startswith(_ATTRIBUTES):
            try:
                os.setxattr(fd, name, os.getxattr(path, name))
            except OSError as error:
                if error.errno not in _NOT_PERMITTED:
                    raise
                meter.fell_back(f"attribute {name}", "none", error.strerror or str(error))


def copy_owner(new: int | str | Path, old: os.stat_result) -> OSError | None:
    """Copy owner and group of `old` to the file `new`, or the group alone.

    Returns the error that refused the owner, or None. Raises OSError for any other failure.
    """
    refused: OSError | None = None
    for owner in (old.st_uid, -1):
        try:
            os.chown(new, owner, old.st_gid)
            break
        except OSError as error:
            if error.errno not in _NOT_PERMITTED:
                raise
            refused = refused or error
    return refused


def set_permissions(fd: int, wanted: int, meter: Meter) -> None:
    """Set the permissions of an open file if they differ; record a refusal as a fallback."""
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    if found == wanted:
        return
    try:
        os.fchmod(fd, wanted)
    except OSError as error:
        if error.errno not in _NOT_PERMITTED:
            raise
        reason = error.strerror or str(error)
        meter.fell_back(f"permissions {wanted:03o}", f"permissions {found:03o}", reason)
