"""The mount table of this process: file system and mount options of a path.

Format of /proc/self/mountinfo: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ESCAPE = re.compile(r"\\([0-7]{3})")

_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"),
    *("orangefs", "smb3", "smbfs", "wekafs"),
}
_LOCAL = {
    *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "msdos", "nilfs2"),
    *("ntfs3", "reiserfs", "vfat", "xfs", "zfs"),
}
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo. `root` is the part of the file system that is mounted here."""

    mount_id: int
    device: str
    root: str
    mount_point: str
    options: tuple[str, ...]
    fs_type: str
    source: str
    super_options: tuple[str, ...]

    @property
    def all_options(self) -> list[str]:
        """Options of the mount and of the file system, each once, in the kernel's order.

        A read-only mount of a writable file system is read-only, so its `rw` is left out.
        """
        both = dict.fromkeys(self.options + self.super_options)
        if "ro" in both:
            both.pop("rw", None)
        return list(both)

    @property
    def kind(self) -> str:
        """`local`, `network`, `fuse`, `tmpfs`, `overlay` or `unknown`; selects the advice."""
        if self.fs_type in _MEMORY:
            return "tmpfs"
        if self.fs_type in {"fuse", "fuseblk", "virtiofs"} or self.fs_type.startswith("fuse."):
            return "fuse"
        if self.fs_type in {"overlay", "aufs"}:
            return "overlay"
        if self.fs_type in _NETWORK:
            return "network"
        if self.fs_type in _LOCAL or self.source.startswith("/dev/"):
            return "local"
        return "unknown"


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse mountinfo. The order is that of the file, in which later mounts come last."""
    return [mount for mount in map(_parse_line, text.splitlines()) if mount is not None]


@functools.lru_cache(maxsize=4096)  # a run reads the table before and after every operation
def _parse_line(line: str) -> Mount | None:
    # Split at single blanks: an empty source is an empty string between two of them.
    left, separator, right = line.partition(" - ")
    fields, tail = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(tail) < 3:
        return None
    return Mount(
        mount_id=int(fields[0]),
        device=fields[2],
        root=_unescape(fields[3]),
        mount_point=_unescape(fields[4]),
        options=tuple(fields[5].split(",")),
        fs_type=_unescape(tail[0]),
        source=_unescape(tail[1]),
        super_options=tuple(_unescape(tail[2]).split(",")),
    )


def find_mount(mounts: list[Mount], path: str, mount_id: int | None = None) -> Mount | None:
    """Return the mount of the absolute, resolved `path`.

    `mount_id`, if the kernel reports it, is exact. Otherwise the mount has the longest mount point
    that is a parent of `path`; of several at one mount point the last one hides the others.
    """
    if mount_id is not None:
        for mount in mounts:
            if mount.mount_id == mount_id:
                return mount
    target, best = PurePosixPath(path), None
    for mount in mounts:
        if target.is_relative_to(mount.mount_point) and (
            best is None or len(mount.mount_point) >= len(best.mount_point)
        ):
            best = mount
    return best


def read_mounts() -> list[Mount]:
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return parse_mountinfo(text)


def mounts_in(directory: str) -> list[Mount]:
    """Return the mounts at and below the absolute, resolved `directory`, the last one first."""
    below = f"{directory.rstrip('/')}/"
    return [one for one in reversed(read_mounts()) if f"{one.mount_point}/".startswith(below)]


def mount_id_of(descriptor: int) -> int | None:
    """Return the id of the mount of an open file; None if the kernel does not report it."""
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    reported = re.search(r"^mnt_id:\s*(\d+)$", text, re.MULTILINE)
    return int(reported[1]) if reported else None


def mount_of(directory: Path, mounts: list[Mount] | None = None) -> Mount | None:
    """Return the mount of `directory`. Raises OSError if it cannot be opened."""
    descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        mount_id = mount_id_of(descriptor)
    finally:
        os.close(descriptor)
    mounts = read_mounts() if mounts is None else mounts
    return find_mount(mounts, str(directory.resolve()), mount_id)
