"""The mount table, read from fictional text."""

from __future__ import annotations

import pytest

from iobench.environment.mounts import find_mount, parse_mountinfo

TABLE = r"""
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw,discard
30 22 0:40 / /mnt/with\040blank\134slash rw - tmpfs tmpfs rw,size=1k
31 22 259:2 / /mnt/nvme rw,noatime shared:7 master:1 - xfs /dev/nvme0n1p2 rw,attr2,inode64
32 31 0:41 / /mnt/nvme/hidden rw - tmpfs first rw
33 32 0:42 / /mnt/nvme/hidden ro - tmpfs second rw
34 22 0:43 /sub /pool rw - btrfs /dev/mapper/pool rw,subvol=/sub
35 22 0:44 / /nfs rw - nfs4 server:/export rw,vers=4.2
36 22 0:45 / /s3 rw - fuse.mount-s3 mountpoint-s3 rw
37 22 0:46 / /box rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
38 22 0:47 / /strange rw - something  rw
39 22 0:48 / /virtio rw - virtiofs share rw
40 22 259:3 / /odd rw - newfs /dev/nvme0n1p3 rw
"""


def at(path: str) -> str | None:
    mount = find_mount(parse_mountinfo(TABLE), path)
    return None if mount is None else f"{mount.mount_id}"


@pytest.mark.parametrize(
    ("path", "mount_id"),
    [
        ("/", "22"),
        ("/mnt", "22"),
        ("/mnt/nvme", "31"),
        ("/mnt/nvme/a/b", "31"),
        ("/mnt/nvme2/a", "22"),
        ("/pool", "34"),
        ("/mnt/with blank\\slash/file", "30"),  # octal escapes are undone
        ("/mnt/nvme/hidden/x", "33"),  # the later of two mounts at one place hides the earlier one
    ],
)
def test_longest_mount_point_by_whole_components(path: str, mount_id: str) -> None:
    """`/mnt/nvme2` is not on the mount at `/mnt/nvme`. A mount id from the kernel counts, even if
    the path suggests another mount."""
    assert at(path) == mount_id
    mount = find_mount(parse_mountinfo(TABLE), path, mount_id=31)
    assert mount is not None
    assert mount.fs_type == "xfs"


def test_fields_of_mounts() -> None:
    """Any number of tags before the dash, and an empty source, are parsed correctly. Each option of
    mount and file system is listed once; a read-only mount of a writable file system is
    read-only."""
    mounts = {mount.mount_id: mount for mount in parse_mountinfo(TABLE)}
    assert (mounts[31].source, mounts[31].device) == ("/dev/nvme0n1p2", "259:2")
    assert (mounts[38].source, mounts[38].super_options) == ("", ("rw",))
    assert mounts[31].all_options == ["rw", "noatime", "attr2", "inode64"]
    assert mounts[33].all_options == ["ro"]


@pytest.mark.parametrize(
    ("mount_point", "kind"),
    [
        ("/", "local"),
        ("/mnt/nvme/hidden", "tmpfs"),
        ("/pool", "local"),
        ("/nfs", "network"),
        ("/s3", "fuse"),
        ("/virtio", "fuse"),
        ("/box", "overlay"),
        ("/strange", "unknown"),
        ("/odd", "local"),
    ],
)
def test_kind_of_storage(mount_point: str, kind: str) -> None:
    """The type decides; an unknown type on a device node is local."""
    mounts = {mount.mount_point: mount for mount in parse_mountinfo(TABLE)}
    assert mounts[mount_point].kind == kind
