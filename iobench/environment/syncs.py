"""Syncs: whether fsync reaches the storage of a directory, as far as the page cache shows it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from iobench import linux
from iobench.environment.mounts import mount_of
from iobench.units import KIB

BY_A_LIBRARY = "fsync of the C library does nothing: a preloaded library replaces it"
PROBE_BYTES = 256 * KIB  # more than a file system writes for the metadata of one file
_NO_CACHESTAT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
# Their pages are clean after a sync that was carried out.
_CLEAN_AFTER_SYNC = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}


def try_sync(fd: int, directory: Path) -> tuple[str, str]:
    """Write PROBE_BYTES to the open file `fd` in `directory`, and sync them.

    Returns (why nothing can be seen here, why syncs are ignored here); empty texts where that is
    not so. The file is synced by `os.fsync`, as writers do it, and then by the system call. So a
    preloaded library is seen by the difference. Raises OSError.
    """
    os.pwrite(fd, os.urandom(PROBE_BYTES), 0)
    try:
        dirty = linux.cachestat_unsynced_bytes(fd)
        os.fsync(fd)
        kept = linux.cachestat_unsynced_bytes(fd)
        linux.kernel_fsync(fd)
        left = linux.cachestat_unsynced_bytes(fd)
    except OSError as error:
        if error.errno not in _NO_CACHESTAT:
            raise
        linux.kernel_fsync(fd)
        return f"no cachestat here ({error.strerror})", ""
    if dirty < PROBE_BYTES:
        return "cachestat shows no dirty pages on this file system", ""
    if not left:
        return "", BY_A_LIBRARY if kept else ""
    mount = mount_of(directory)
    if mount is not None and mount.fs_type in _CLEAN_AFTER_SYNC:
        return "", f"pages of {mount.fs_type} stay dirty after fsync(2)"
    return "pages stay dirty after a sync on this file system", ""
