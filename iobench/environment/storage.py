"""Description of the storage of one directory: mount, file system, space and block device."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from iobench.environment.blockdev import BlockDevice, describe_device, find_device
from iobench.environment.facts import Fact, joined, size_of
from iobench.environment.mounts import Mount, mount_of, read_mounts
from iobench.errors import TargetError

OBJECT_STORE = "object store"
"""The kind of a storage that has buckets."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage of one directory or bucket. Sizes are bytes; None for unknown facts.

    `free_bytes` is free for ordinary users. `used_ratio` counts like df: blocks reserved for root
    are neither free nor used. Inodes are None on file systems that allocate them as needed.
    `device` is None if no block device can be identified (tmpfs, network file systems, overlays in
    containers). `upper` describes the file system that an overlay writes to, if it is visible. Only
    an object store has an `endpoint`.
    """

    path: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_ratio: float | None = None
    inodes_total: int | None = None
    inodes_free: int | None = None
    fs_block_bytes: int | None = None
    kind: str | None = None
    mount_point: str | None = None
    fs_type: str | None = None
    source: str | None = None
    mount_options: tuple[str, ...] = ()
    device: BlockDevice | None = None
    upper: Storage | None = None
    endpoint: str | None = None

    def leaves(self) -> list[BlockDevice]:
        """Return the devices at the bottom of the stack; empty where no device is known."""
        return [] if self.device is None else self.device.leaves()

    def words(self) -> list[str]:
        """Return file system and device for one line: `ext4`, `Samsung 990 PRO`."""
        device = self.device or BlockDevice()
        return [fact for fact in (self.fs_type or self.kind, device.model or device.name) if fact]

    def __str__(self) -> str:
        """`ext4 on vda` or `s3 at http://127.0.0.1:9000`."""
        below = (self.device and self.device.name) or self.endpoint or self.source
        place = f" {'at' if self.endpoint else 'on'} {below}" if below else ""
        return f"{self.fs_type or self.kind}{place}"

    def facts(self) -> list[Fact]:
        """Return kind, mount, free space, and the device with those below it."""
        return Fact.known(
            [
                ("kind", self.kind, "storage.kind"),
                ("file system", self.fs_type and self._mounted()),
                ("mount options", ", ".join(self.mount_options), "storage.options"),
                ("upper directory", self.upper and self.upper._mounted()),
                (
                    "free space",
                    joined(
                        size_of(self.free_bytes, f"{{}} of {size_of(self.total_bytes)}"),
                        None if self.used_ratio is None else f"{self.used_ratio:.0%} used",
                    ),
                    "storage.free",
                ),
                (
                    "free inodes",
                    "" if self.inodes_free is None else f"{self.inodes_free}",
                    "storage.inodes",
                ),
                *(self.device.facts() if self.device else ()),
            ]
        )

    def _mounted(self) -> str:
        where = f"{self.fs_type} on {self.mount_point}"
        return f"{where} from {self.source}" if self.source else where


def check_directory(directory: Path | str) -> Path:
    """Return `directory`, absolute, with links followed. Raises TargetError if it is not one."""
    try:
        mode = os.stat(directory).st_mode
    except FileNotFoundError:
        raise TargetError(f"--target {directory}: no such directory; make it first") from None
    except OSError as error:  # no permission for a directory above it, or a loop of links
        raise TargetError(f"--target {directory}: cannot be reached ({error.strerror})") from error
    if not stat.S_ISDIR(mode):
        raise TargetError(f"--target {directory}: is not a directory; name one")
    return Path(directory).resolve()


def describe_storage(directory: Path | str) -> Storage:
    """Describe the storage of `directory`. Raises TargetError if it is not a directory."""
    path = check_directory(directory)
    mounts = read_mounts()
    mount, space = mount_of(path, mounts), os.statvfs(path)
    found = Storage(kind="unknown") if mount is None else describe_mount(mount)
    used, free = space.f_blocks - space.f_bfree, space.f_bavail
    return replace(
        found,
        path=str(path),
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=free * space.f_frsize,
        used_ratio=used / (used + free) if used + free else None,
        inodes_total=space.f_files or None,
        inodes_free=space.f_favail if space.f_files else None,
        fs_block_bytes=space.f_bsize,
        upper=_upper(mount, mounts) if mount else None,
    )


def describe_mount(mount: Mount) -> Storage:
    """Describe file system, options and device of one mount."""
    directory = find_device(mount)
    return Storage(
        kind=mount.kind,
        mount_point=mount.mount_point,
        fs_type=mount.fs_type,
        source=mount.source,
        mount_options=tuple(mount.all_options),
        device=describe_device(directory) if directory else None,
    )


def _upper(mount: Mount, mounts: list[Mount]) -> Storage | None:
    """Describe the file system of an overlay's upper directory; None if a container hides it."""
    if mount.fs_type != "overlay":
        return None
    for option in mount.super_options:
        if option.startswith("upperdir="):
            try:
                upper = mount_of(Path(option.removeprefix("upperdir=")), mounts)
            except OSError:
                return None
            return None if upper is None or upper is mount else describe_mount(upper)
    return None
