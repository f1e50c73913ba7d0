"""What stands at a name before a new file takes its place, and what the new one gets from it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from iobench.errors import TargetError
from iobench.writers.transfer import Meter

__all__ = ["check_replaceable", "set_permissions", "standing", "take_after", "take_owner"]

_READ_WRITE = stat.S_IRUSR | stat.S_IWUSR
_PERMISSIONS = 0o777  # no set-user-ID: writing into a file takes it away too

_ATTRIBUTES = ("user.", "system.posix_acl_access")  # others are the kernel's own

_NOT_TO_BE_HAD = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""Refusals of owners, permissions, attributes: no right to, or a file system that keeps none."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def standing(path: str | os.PathLike[str]) -> tuple[str, os.stat_result | None]:
    """`path` from the root, so that it holds whatever the process changes to, and what is there.

    A link is followed where the kernel follows it: it refuses a link that another user made in a
    sticky directory (fs.protected_symlinks), and reading the link would get past that. Links among
    the directories above are left to the kernel: a path through them is as good, and resolving
    them costs more than writing a small file. Raises OSError for what cannot be looked at.
    """
    path = os.fspath(path)
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    if ".." in path:
        _look(os.stat, path)
        path = os.path.realpath(path)
    found = _look(os.lstat, path)
    if found is not None and stat.S_ISLNK(found.st_mode):
        found = _look(os.stat, path)
        path = os.path.realpath(path)
    return path, found


def _look(how: Callable[[str], os.stat_result], path: str) -> os.stat_result | None:
    """None for a name that is free; every other error is raised: it may hide a file."""
    try:
        return how(path)
    except FileNotFoundError:
        return None


def check_replaceable(path: str, old: os.stat_result | None) -> None:
    """Raise TargetError unless `path` is free or a regular file: all else would be gone after."""
    if old is not None and not stat.S_ISREG(old.st_mode):
        kind = _KINDS.get(stat.S_IFMT(old.st_mode), "no regular file")
        raise TargetError(
            f"{path}: is {kind}, which a writer would replace by a file; name a file, or a new one"
        )


def take_after(fd: int, path: str | Path, old: os.stat_result, meter: Meter) -> int:
    """Give the new file owner, group, attributes and permissions of the `old` one at `path`.

    What cannot be is recorded. Returns the permissions to set at the end: until then its owner may
    read and write it, for writers that open it once more.
    """
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        refused = take_owner(fd, old)
        if refused is not None:
            wanted, used = f"owner {old.st_uid}", f"owner {new.st_uid}"
            meter.fell_back(wanted, used, refused.strerror or str(refused))
    _take_attributes(fd, path, meter)
    permissions = old.st_mode & _PERMISSIONS
    set_permissions(fd, permissions | _READ_WRITE, meter)
    return permissions


def _take_attributes(fd: int, path: str | Path, meter: Meter) -> None:
    """Give the new file the users' attributes and the access control list of that at `path`."""
    try:
        names = os.listxattr(path)
    except OSError as error:
        if error.errno not in {*_NOT_TO_BE_HAD, errno.ENOENT}:
            raise
        return
    for name in names:
        if name.startswith(_ATTRIBUTES):
            try:
                os.setxattr(fd, name, os.getxattr(path, name))
            except OSError as error:
                if error.errno not in _NOT_TO_BE_HAD:
                    raise
                meter.fell_back(f"attribute {name}", "none", error.strerror or str(error))


def take_owner(new: int | str | Path, old: os.stat_result) -> OSError | None:
    """Give the file `new` owner and group of `old`, or the group alone; why not both.

    Raises OSError for what is no lack of rights.
    """
    refused: OSError | None = None
    for owner in (old.st_uid, -1):
        try:
            os.chown(new, owner, old.st_gid)
            break
        except OSError as error:
            if error.errno not in _NOT_TO_BE_HAD:
                raise
            refused = refused or error
    return refused


def set_permissions(fd: int, wanted: int, meter: Meter) -> None:
    """Set the permissions of an open file that has others; recorded where it cannot be."""
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    if found == wanted:
        return
    try:
        os.fchmod(fd, wanted)
    except OSError as error:
        if error.errno not in _NOT_TO_BE_HAD:
            raise
        reason = error.strerror or str(error)
        meter.fell_back(f"permissions {wanted:03o}", f"permissions {found:03o}", reason)
