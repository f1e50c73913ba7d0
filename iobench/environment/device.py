"""The block device's own counters, to check that the bytes of a sample reached it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from iobench.environment.blockdev import device_directory, find_device
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.mounts import Mount, mount_of

_SECTOR_BYTES = 512  # the unit of the kernel's counters, whatever the block size of the device


@dataclass(frozen=True, kw_only=True)
class DeviceCounters:
    """Bytes that a device has moved since boot; subtract two readings to get an interval.

    They count the I/O of all processes. For several devices (btrfs) they are the sum, so a mirror
    counts every written byte twice. `flushes` are those of the device's own write cache. They are 0
    where the kernel counts none: before Linux 5.5, for device mapper, and without such a cache.
    """

    read_bytes: int
    write_bytes: int
    flushes: int = 0

    def __sub__(self, earlier: DeviceCounters) -> DeviceCounters:
        return DeviceCounters(
            read_bytes=self.read_bytes - earlier.read_bytes,
            write_bytes=self.write_bytes - earlier.write_bytes,
            flushes=self.flushes - earlier.flushes,
        )

    def __add__(self, other: DeviceCounters) -> DeviceCounters:
        return DeviceCounters(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            flushes=self.flushes + other.flushes,
        )


def parse_stat(text: str) -> DeviceCounters | None:
    """Parse the text of /sys/dev/block/MAJ:MIN/stat; None if it has another form.

    Fields: Documentation/block/stat.rst.
    """
    words = text.split()
    if len(words) < 11 or not all(word.isdigit() for word in words):
        return None
    return DeviceCounters(
        read_bytes=int(words[2]) * _SECTOR_BYTES,
        write_bytes=int(words[6]) * _SECTOR_BYTES,
        flushes=int(words[15]) if len(words) > 15 else 0,  # since Linux 5.5
    )


class DeviceMonitor:
    """Reads the counters of the device under a directory; the device is looked up only once.

    `files` are the counter files of sysfs. There are none, and `read` returns None, for tmpfs,
    network and FUSE file systems, zfs, and overlays in containers: no block device can be
    identified there.
    """

    def __init__(self, directory: Path | str, sysfs: Path = Path("/sys")) -> None:
        mount = mount_of(Path(directory))
        found = [] if mount is None else device_directories(mount, sysfs)
        counting = [path for path in found if _counts(path)]
        # The counters of only some of a file system's devices would look like missing bytes.
        whole = len(counting) == len(found)
        self.files = tuple(path / "stat" for path in counting) if whole else ()
        # Flushes are counted for the whole disk only (blk_account_io_flush).
        self._disks = [path.parent.parent / "stat" for path in self.files if _is_partition(path)]

    def read(self) -> DeviceCounters | None:
        """Return the counters now, in about 20 microseconds a file; None without a device."""
        total: DeviceCounters | None = None
        for path in self.files:
            counters = parse_stat(read_text(path) or "")
            if counters is None:
                return None
            total = counters if total is None else total + counters
        for path in self._disks:
            disk = parse_stat(read_text(path) or "")
            if total is not None and disk is not None:
                total = replace(total, flushes=total.flushes + disk.flushes)
        return total


def device_directories(mount: Mount, sysfs: Path) -> list[Path]:
    """Return the sysfs directories of the devices of a mount: one, or all of a btrfs."""
    number = find_device(mount.device, mount.source, sysfs)
    directory = device_directory(number, sysfs) if number else None
    if directory is None:
        return []
    if mount.fs_type == "btrfs":
        for pool in (sysfs / "fs/btrfs").glob("*/devices"):
            if (pool / directory.name).exists():
                return sorted(member.resolve() for member in pool.iterdir())
    return [directory]


def _is_partition(stat: Path) -> bool:
    return stat.with_name("partition").exists()


def _counts(directory: Path) -> bool:
    """Whether the kernel counts the device's I/O: the disk's queue/iostats can disable that."""
    disk = directory.parent if _is_partition(directory / "stat") else directory
    return read_int(disk / "queue/iostats") != 0 and (directory / "stat").exists()
