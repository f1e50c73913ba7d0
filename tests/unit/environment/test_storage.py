"""The mount table from fictional text; block devices and their counters, read from a fake sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.environment import blockdev
from iobench.environment.blockdev import (
    BlockDevice,
    DeviceMonitor,
    describe_device,
    device_directories,
    find_device,
    parse_stat,
)
from iobench.environment.mounts import Mount, find_mount, parse_mountinfo

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


STAT = "10 1 80 5 20 2 160 6 0 7 11 3 0 24 1 4 2"


class Sysfs:
    """A sysfs in a directory, with only the files of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/block").mkdir(parents=True)

    def disk(self, name: str, number: str, **files: str) -> Path:
        return self._device(self.root / "devices/block" / name, number, files)

    def partition(self, disk: Path, name: str, number: str, **files: str) -> Path:
        return self._device(disk / name, number, {"partition": "1", **files})

    def _device(self, path: Path, number: str, files: dict[str, str]) -> Path:
        path.mkdir(parents=True)
        (self.root / "dev/block" / number).symlink_to(path)
        self.put(path, dev=number, stat=STAT, **files)
        return path

    def put(self, path: Path, **files: str) -> None:
        for name, text in files.items():
            file = path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    monkeypatch.setattr(blockdev, "_SYSFS", tmp_path / "sys")
    return Sysfs(tmp_path / "sys")


def described(number: str) -> BlockDevice:
    directory = find_device(mount(number))
    assert directory is not None
    return describe_device(directory)


def mount(device: str, fs_type: str = "ext4", source: str = "none") -> Mount:
    return Mount(
        mount_id=1,
        device=device,
        root="/",
        mount_point="/",
        options=("rw",),
        fs_type=fs_type,
        source=source,
        super_options=("rw",),
    )


def test_a_partition_has_the_queue_of_its_disk(sysfs: Sysfs) -> None:
    """The size is the partition's; queue, model and scheduler are the disk's."""
    disk = sysfs.disk(
        "nvme0n1",
        "259:0",
        size="4000",
        queue__scheduler="[none] mq-deadline",
        queue__nr_requests="1023",
        queue__rotational="0",
        queue__write_cache="write back",
        queue__discard_max_bytes="512",
        device__model="Fast Disk 9000",
        device__transport="pcie",
    )
    sysfs.partition(disk, "nvme0n1p2", "259:2", size="1000")
    found = described("259:2")
    assert (found.name, found.disk, found.type) == ("nvme0n1p2", "nvme0n1", "nvme")
    assert found.size_bytes == 512_000
    assert (found.scheduler, found.nr_requests) == ("none", 1023)
    assert (found.model, found.transport) == ("Fast Disk 9000", "pcie")
    assert (found.rotational, found.discard) == (False, True)
    assert found.fua is None


def test_a_stack_is_followed_to_its_disks(sysfs: Sysfs) -> None:
    """dm-crypt on a RAID of two partitions of two disks."""
    for letter, number in (("a", 0), ("b", 16)):
        disk = sysfs.disk(f"sd{letter}", f"8:{number}", device__model=f"Disk {letter}")
        sysfs.partition(disk, f"sd{letter}1", f"8:{number + 1}")
    raid = sysfs.disk("md0", "9:0", md__level="raid0")
    (raid / "slaves").mkdir()
    for letter in "ab":
        (raid / "slaves" / f"sd{letter}1").symlink_to(
            sysfs.root / f"devices/block/sd{letter}/sd{letter}1"
        )
    crypt = sysfs.disk("dm-0", "253:0", dm__uuid="CRYPT-LUKS2-0123-root")
    (crypt / "slaves").mkdir()
    (crypt / "slaves/md0").symlink_to(raid)
    found = described("253:0")
    assert found.type == "dm-crypt"
    assert found.backing[0].type == "raid0"
    assert [leaf.model for leaf in found.leaves()] == ["Disk a", "Disk b"]


def test_what_has_no_device(sysfs: Sysfs) -> None:
    """tmpfs and network mounts have no block device, and neither has a missing source."""
    del sysfs
    assert find_device(mount("0:40", "tmpfs", "tmpfs")) is None
    assert find_device(mount("0:41", "btrfs", "/dev/no-such-device-node")) is None


def test_counters_are_in_bytes_and_subtract() -> None:
    """The kernel's 512-byte sectors become bytes. A difference is what was moved in between. Old
    kernels count no discards and flushes; an empty or foreign file is not read as zeros."""
    before, after = parse_stat(STAT), parse_stat("12 1 96 5 25 2 1184 6 0 1007 11 3 0 24 1 5 2")
    old = parse_stat("1 2 3 4 5 6 7 8 9 10 11")
    assert before is not None
    assert after is not None
    assert old is not None
    assert (before.read_bytes, before.write_bytes) == (80 * 512, 160 * 512)
    spent = after - before
    assert (spent.read_bytes, spent.write_bytes) == (16 * 512, 1024 * 512)
    assert (before.flushes, spent.flushes) == (4, 1)
    assert (old.read_bytes, old.write_bytes, old.flushes) == (3 * 512, 7 * 512, 0)
    assert [parse_stat(text) for text in ("", "1 2 3", "a b c d e f g h i j k")] == [None] * 3


def test_flushes_of_a_partition_are_those_of_its_disk(
    sysfs: Sysfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts none for the partition itself, and all other I/O."""
    disk = sysfs.disk("sda", "8:0")
    sysfs.partition(disk, "sda1", "8:1")
    sysfs.put(disk / "sda1", stat="1 1 8 5 2 2 16 6 0 7 11 3 0 24 1 0 0")
    monkeypatch.setattr("iobench.environment.blockdev.mount_of", lambda _: mount("8:1"))
    found = DeviceMonitor(tmp_path).read()
    assert found is not None
    assert (found.read_bytes, found.write_bytes, found.flushes) == (8 * 512, 16 * 512, 4)


def test_all_devices_of_a_btrfs_are_counted(sysfs: Sysfs) -> None:
    """A btrfs of two disks is found through its pool; its counters are the sum of both."""
    disks = [sysfs.disk(f"sd{x}", f"8:{n}") for x, n in (("a", 0), ("b", 16))]
    pool = sysfs.root / "fs/btrfs/1234/devices"
    pool.mkdir(parents=True)
    for disk in disks:
        (pool / disk.name).symlink_to(disk)
    found = device_directories(mount("8:16", "btrfs"))
    assert [path.name for path in found] == ["sda", "sdb"]


def test_a_device_that_does_not_count_is_not_believed(
    sysfs: Sysfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With iostats off the counters do not change, so the monitor returns None, not zero."""
    disk = sysfs.disk("sda", "8:0", queue__iostats="1")
    monkeypatch.setattr("iobench.environment.blockdev.mount_of", lambda _: mount("8:0"))
    counting = DeviceMonitor(tmp_path)
    assert [path.parent.name for path in counting.files] == ["sda"]
    assert counting.read() == parse_stat(STAT)
    sysfs.put(disk, queue__iostats="0")
    silent = DeviceMonitor(tmp_path)
    assert (silent.files, silent.read()) == ((), None)
