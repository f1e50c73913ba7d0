"""A block device in sysfs: model, queue, the devices that it is made of, and its own counters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from iobench.environment.facts import joined, size_of
from iobench.environment.kernelfs import read_int, read_text, selected
from iobench.environment.mounts import Mount, mount_of
from iobench.units import KIB

_SECTOR_BYTES = 512  # the unit of the kernel's sizes and counters, whatever the device's blocks
_SYSFS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class BlockDevice:
    """A block device, its queue, and under `backing` the devices below it; sizes in bytes.

    A partition has no queue of its own: the figures are those of the disk in `disk`. Serial numbers
    are omitted, since users share their results.
    """

    device: str | None = None
    name: str | None = None
    disk: str | None = None
    type: str | None = None
    model: str | None = None
    driver: str | None = None
    transport: str | None = None
    size_bytes: int | None = None
    rotational: bool | None = None
    scheduler: str | None = None
    nr_requests: int | None = None
    max_sectors_kb: int | None = None
    max_hw_sectors_kb: int | None = None
    logical_block_bytes: int | None = None
    physical_block_bytes: int | None = None
    optimal_io_bytes: int | None = None
    dma_alignment: int | None = None
    write_cache: str | None = None
    fua: bool | None = None
    read_ahead_kb: int | None = None
    discard: bool | None = None
    iostats: bool | None = None
    loop_direct_io: bool | None = None
    backing_file: str | None = None
    backing: tuple[BlockDevice, ...] = ()

    def leaves(self) -> list[BlockDevice]:
        """Return the devices at the bottom of a stack (dm, md ...), or the device itself."""
        return [leaf for part in self.backing for leaf in part.leaves()] or [self]

    def __str__(self) -> str:
        """What stays of it: `nvme Samsung 990 PRO 931.51 GiB`; empty if nothing is known."""
        return " ".join(filter(None, (self.type, self.model, size_of(self.size_bytes))))

    def facts(self, depth: int = 0) -> Iterator[tuple[str, str] | tuple[str, str, str]]:
        """Yield names, words and subjects of the device, and of those below it, indented."""
        pad = "  " * depth
        words = joined(
            *(self.name, self.type, self.transport, self.model, size_of(self.size_bytes)),
            self.backing_file and f"file {self.backing_file}",
        )
        yield f"{pad}device", words, "" if depth else "storage.device"
        limits = (
            ("scheduler", self.scheduler),
            ("requests", self.nr_requests),
            ("largest", size_of((self.max_sectors_kb or 0) * KIB)),
            ("read-ahead", size_of((self.read_ahead_kb or 0) * KIB)),
            ("cache", self.write_cache),
        )
        yield f"{pad}queue", joined(*(f"{name} {value}" for name, value in limits if value))
        logical, physical = self.logical_block_bytes, self.physical_block_bytes
        if logical and physical:
            yield f"{pad}blocks", f"{logical} B logical, {physical} B physical"
        for part in self.backing:
            yield from part.facts(depth + 1)


def find_device(mount: Mount) -> Path | None:
    """Return the sysfs directory of the block device under a mount; None for storage without one.

    btrfs and others report an anonymous 0:N in mountinfo; then the source is used if it names a
    device node.
    """
    if (link := _SYSFS / "dev/block" / mount.device).exists():
        return link.resolve()
    if not mount.source.startswith("/dev/"):
        return None
    try:
        number = os.stat(mount.source).st_rdev
    except OSError:
        return None
    link = _SYSFS / f"dev/block/{os.major(number)}:{os.minor(number)}"
    return link.resolve() if link.exists() else None


def describe_device(directory: Path) -> BlockDevice:
    """Describe the device with this directory in sysfs."""
    partition = (directory / "partition").exists()
    disk = directory.parent if partition else directory
    queue = disk / "queue"
    return BlockDevice(
        device=read_text(directory / "dev"),
        name=directory.name,
        disk=disk.name,
        type=device_type(disk),
        model=_model(disk),
        driver=_link_name(disk / "device/driver"),
        transport=read_text(disk / "device/transport"),
        size_bytes=_sectors(directory / "size"),
        rotational=_flag(queue / "rotational"),
        scheduler=selected(read_text(queue / "scheduler")),
        nr_requests=read_int(queue / "nr_requests"),
        max_sectors_kb=read_int(queue / "max_sectors_kb"),
        max_hw_sectors_kb=read_int(queue / "max_hw_sectors_kb"),
        logical_block_bytes=read_int(queue / "logical_block_size"),
        physical_block_bytes=read_int(queue / "physical_block_size"),
        optimal_io_bytes=read_int(queue / "optimal_io_size"),
        dma_alignment=read_int(queue / "dma_alignment"),
        write_cache=read_text(queue / "write_cache"),
        fua=_flag(queue / "fua"),
        read_ahead_kb=read_int(queue / "read_ahead_kb"),
        discard=(read_int(queue / "discard_max_bytes") or 0) > 0,
        iostats=_flag(queue / "iostats"),
        loop_direct_io=_flag(disk / "loop/dio"),
        backing_file=read_text(disk / "loop/backing_file"),
        backing=tuple(
            describe_device(one.resolve())
            for one in sorted((disk / "slaves").glob("*"))
            if one.exists()
        ),
    )


def device_type(disk: Path) -> str:
    """Return `dm-crypt`, `raid0`, `loop`, `zram`, `nvme`, `virtio`, `scsi` ... from sysfs."""
    if (disk / "dm").exists():
        uuid = read_text(disk / "dm/uuid") or ""
        target = uuid.split("-", 1)[0].lower()
        return f"dm-{target}" if target else "dm"
    if (disk / "md").exists():
        return read_text(disk / "md/level") or "md"
    if (disk / "loop").exists() or disk.name.startswith("loop"):
        return "loop"
    for prefix in ("zram", "nvme", "pmem", "nbd", "rbd", "ram", "mmcblk"):
        if disk.name.startswith(prefix):
            return prefix
    return _link_name(disk / "device/subsystem") or "block"


def _model(disk: Path) -> str | None:
    words = [read_text(disk / "device/vendor"), read_text(disk / "device/model")]
    # virtio reports the number of a PCI vendor here, not a name
    return " ".join(word for word in words if word and not word.startswith("0x")) or None


def _link_name(link: Path) -> str | None:
    return link.resolve().name if link.is_symlink() else None


def _flag(path: Path) -> bool | None:
    value = read_int(path)
    return None if value is None else value != 0


def _sectors(path: Path) -> int | None:
    value = read_int(path)
    return None if value is None else value * _SECTOR_BYTES


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

    def __init__(self, directory: Path | str) -> None:
        mount = mount_of(Path(directory))
        found = [] if mount is None else device_directories(mount)
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


def device_directories(mount: Mount) -> list[Path]:
    """Return the sysfs directories of the devices of a mount: one, or all of a btrfs."""
    directory = find_device(mount)
    if directory is None:
        return []
    if mount.fs_type == "btrfs":
        for pool in (_SYSFS / "fs/btrfs").glob("*/devices"):
            if (pool / directory.name).exists():
                return sorted(member.resolve() for member in pool.iterdir())
    return [directory]


def _is_partition(stat: Path) -> bool:
    return stat.with_name("partition").exists()


def _counts(directory: Path) -> bool:
    """Whether the kernel counts the device's I/O: the disk's queue/iostats can disable that."""
    disk = directory.parent if _is_partition(directory / "stat") else directory
    return read_int(disk / "queue/iostats") != 0 and (directory / "stat").exists()
