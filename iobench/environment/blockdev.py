"""Description of a block device from sysfs: model, queue, and the devices that it is made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iobench.environment.facts import joined, size_of
from iobench.environment.kernelfs import read_int, read_text, selected
from iobench.units import KIB

_DEEPEST = 8  # dm on md on partitions on disks is four; only a cycle in fake data is deeper


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


def device_directory(device: str, sysfs: Path) -> Path | None:
    """Return the sysfs directory of the block device `MAJ:MIN`; None if it does not exist."""
    link = sysfs / "dev/block" / device
    return link.resolve() if link.exists() else None


def find_device(device: str, source: str, sysfs: Path = Path("/sys")) -> str | None:
    """Return the `MAJ:MIN` of the block device under a mount; None for storage without one.

    `device` comes from mountinfo. btrfs and others report an anonymous 0:N there; then `source` is
    used if it names a device node.
    """
    if device_directory(device, sysfs) is not None:
        return device
    if source.startswith("/dev/"):
        try:
            number = os.stat(source).st_rdev
        except OSError:
            return None
        named = f"{os.major(number)}:{os.minor(number)}"
        if device_directory(named, sysfs) is not None:
            return named
    return None


def describe_device(
    device: str, sysfs: Path = Path("/sys"), depth: int = _DEEPEST
) -> BlockDevice | None:
    """Describe the device `MAJ:MIN`; None if sysfs has none of this number."""
    directory = device_directory(device, sysfs)
    if directory is None:
        return None
    partition = (directory / "partition").exists()
    disk = directory.parent if partition else directory
    queue = disk / "queue"
    return BlockDevice(
        device=device,
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
        backing=_backing(disk, sysfs, depth),
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


def _backing(disk: Path, sysfs: Path, depth: int) -> tuple[BlockDevice, ...]:
    if depth == 0:
        return ()
    found = []
    for slave in sorted((disk / "slaves").glob("*")):
        number = read_text(slave / "dev")
        described = describe_device(number, sysfs, depth - 1) if number else None
        if described is not None:
            found.append(described)
    return tuple(found)


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
    return None if value is None else value * 512  # always 512-byte sectors
