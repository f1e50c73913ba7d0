"""The file at a name before it is replaced, and the metadata that is copied to the new file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from iobench.errors import TargetError
from iobench.regular_file import kind_of
from iobench.writers.transfer import Meter

__all__ = ["check_replaceable", "copy_metadata", "copy_owner", "existing_file", "set_permissions"]

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
