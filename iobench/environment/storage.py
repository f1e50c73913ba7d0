"""Description of the storage of one directory: mount, file system, space and block device."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iobench.environment.blockdev import describe_device, find_device
from iobench.environment.mounts import Mount, mount_of, read_mounts
from iobench.errors import TargetError


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


def describe_storage(directory: Path | str) -> dict[str, Any]:
    """Describe the storage of `directory` for a result, as JSON types.

    Sizes are bytes. `device` is None if no block device can be identified (tmpfs, network file
    systems, overlays in containers). `upper` describes the file system that an overlay writes to,
    if it is visible. Raises TargetError if `directory` is not a directory.
    """
    path = check_directory(directory)
    mounts = read_mounts()
    mount = mount_of(path, mounts)
    facts: dict[str, Any] = {"path": str(path), **describe_space(os.statvfs(path))}
    if mount is None:
        return facts | {"kind": "unknown", "fs_type": None, "mount_options": [], "device": None}
    return facts | describe_mount(mount) | {"upper": _upper(mount, mounts)}


def describe_space(answer: os.statvfs_result) -> dict[str, Any]:
    """Describe bytes and inodes from statvfs. `free_bytes` is free for ordinary users.

    `used_ratio` counts like df: blocks reserved for root are neither free nor used. Inodes are None
    on file systems that allocate them as needed.
    """
    unit = answer.f_frsize
    used, free = answer.f_blocks - answer.f_bfree, answer.f_bavail
    return {
        "total_bytes": answer.f_blocks * unit,
        "free_bytes": free * unit,
        "used_ratio": used / (used + free) if used + free else None,
        "inodes_total": answer.f_files or None,
        "inodes_free": answer.f_favail if answer.f_files else None,
        "fs_block_bytes": answer.f_bsize,
    }


def describe_mount(mount: Mount) -> dict[str, Any]:
    """Describe file system, options and device of one mount."""
    number = find_device(mount.device, mount.source)
    return {
        "kind": mount.kind,
        "mount_point": mount.mount_point,
        "fs_type": mount.fs_type,
        "source": mount.source,
        "mount_options": mount.all_options,
        "device": describe_device(number) if number else None,
    }


def leaf_devices(device: Any) -> list[Mapping[str, Any]]:
    """Return the devices at the bottom of a stack (dm, md ...), or the device itself.

    Anything else than a description of a device, as in a damaged record, has none.
    """
    if not isinstance(device, Mapping):
        return []
    backing = device.get("backing")
    parts = backing if isinstance(backing, list) else []
    return [leaf for part in parts for leaf in leaf_devices(part)] or [device]


def _upper(mount: Mount, mounts: list[Mount]) -> dict[str, Any] | None:
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
