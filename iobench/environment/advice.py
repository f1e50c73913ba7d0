"""Advice about a machine and its storage: problems, traps and remedies. Rules without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from iobench.environment.machine import Machine
from iobench.environment.storage import Storage
from iobench.units import GIB, format_size

if TYPE_CHECKING:
    from iobench.environment.probes import Probe

Level = Literal["note", "warn", "fail"]

LOW_MEMORY_BYTES = 2 * GIB  # the data of a small run, staging blocks and torch itself
LOW_FREE_BYTES = 4 * GIB  # the rate of a smaller run means little
FULL_RATIO = 0.9

_TRAPS = {
    "local": (
        "A buffered write is fast up to the dirty limit, then as slow as the device. Without fsync "
        "it measures memory. Devices with a write cache need the flush that fsync sends.",
    ),
    "network": (
        "Close-to-open: other clients see the data only after close; they may see a rename before "
        "the data.",
        "O_DIRECT bypasses the cache of this client, not the server's: a cold read may be "
        "warm there.",
        "fsync is a COMMIT to the server; an export with `async` acknowledges it before the data "
        "is on disk.",
    ),
    "fuse": (
        "With writeback_cache, writes return from the page cache and errors come at fsync; without "
        "it every write is a round trip to the daemon.",
        "The daemon decides about O_DIRECT and caching (FOPEN_DIRECT_IO) and may have a cache of "
        "its own: a read that is proved cold here can be warm there.",
        "The daemon defines rename and fsync: on object-store mounts a rename may be a copy, and "
        "data may reach the store only at close.",
    ),
    "tmpfs": (
        "Files here are memory: nothing is durable, and a checkpoint takes memory from the job.",
        "Nothing can be evicted, so no read is ever cold.",
    ),
    "overlay": (
        "The first write to a file of a lower layer copies the whole file up; write new files.",
        "The file system of the upper directory decides speed, O_DIRECT and durability. For "
        "reliable figures mount a volume and select it with --target.",
    ),
    "unknown": (),
}
_FS_TRAPS = {
    "btrfs": "Since Linux 6.14 O_DIRECT writes to files with checksums go through the page cache; "
    "after chattr +C on an empty directory its new files have no checksums.",
    "zfs": "The ARC is not part of the page cache: eviction cannot be proved. Before OpenZFS 2.3 "
    "O_DIRECT is accepted and ignored.",
}
_KINDS: dict[str, tuple[Level, str, str]] = {
    "network": ("warn", "the server's caches and disks decide", "Read its traps below."),
    "fuse": ("warn", "a daemon decides what each call means", "Read its traps below."),
    "tmpfs": ("fail", "memory, not storage", "Choose another --target."),
    "unknown": ("warn", "of an unknown kind", "Rely on the probes only."),
}
_OPTIONS = {
    "nobarrier": "fsync does not flush the device: a power cut loses acknowledged checkpoints.",
    "barrier=0": "fsync does not flush the device: a power cut loses acknowledged checkpoints.",
    "data=journal": "Every byte is written twice, and O_DIRECT goes through the page cache.",
    "data=writeback": "After a crash a file may show old blocks; sync files before the manifest.",
    "sync": "Every write waits for the disk: buffered writers measure latency, not bandwidth.",
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One piece of advice on a `subject` such as `cpu.governor`; `remedy` says what to do."""

    level: Level
    subject: str
    message: str
    remedy: str = ""


def _note(subject: str, message: str) -> Advice:
    return Advice(level="note", subject=subject, message=message)


def _warn(subject: str, message: str, remedy: str) -> Advice:
    return Advice(level="warn", subject=subject, message=message, remedy=remedy)


def _fail(subject: str, message: str, remedy: str) -> Advice:
    return Advice(level="fail", subject=subject, message=message, remedy=remedy)


def advise(machine: Machine, storage: Storage, probes: list[Probe]) -> list[Advice]:
    """Return the advice on a machine, a storage and its probes, in the order of a report."""
    return [
        *_machine(machine),
        *_space(storage),
        *_kind(storage),
        *_options(storage),
        *_device(storage),
        *_probes(probes),
    ]


def _machine(machine: Machine) -> Iterator[Advice]:
    governor = machine.cpu.governor
    if governor not in (None, "performance"):
        yield _warn(
            "cpu.governor",
            f"CPU governor is {governor}: times vary with the clock",
            "As root: cpupower frequency-set -g performance",
        )
    available, limit = machine.memory.available_bytes, machine.cgroup.memory_limit_bytes
    usable = min((n for n in (available, limit) if n is not None), default=None)
    if usable is not None and usable < LOW_MEMORY_BYTES:
        yield _warn(
            "memory",
            f"only {format_size(usable)} of memory is available",
            f"Free some: a run needs {format_size(LOW_MEMORY_BYTES)}, or a smaller --size.",
        )
    if machine.memory.host_takes_free_memory:
        yield _warn(
            "memory.pages",
            "new pages are slow here: this virtual machine returns free memory to its host",
            "Page-cache writers are limited by this, not by the device. On the host: switch off "
            "free page reporting of the balloon.",
        )
    if machine.versions.get("fio") is None:
        yield _warn(
            "fio", "fio is missing: writers cannot be compared with it", "apt-get install fio"
        )
    if machine.versions.get("torch") is None:
        yield _fail("torch", "torch is not installed", "pip install torch")
    ring = machine.io_uring
    if not ring.works:
        yield _warn("io_uring", f"io_uring: {ring.reason}", ring.remedy)
    gds = machine.gds
    if gds.remedy:
        yield _warn("gds", f"GPUDirect Storage: {gds.state}", gds.remedy)


def _space(storage: Storage) -> Iterator[Advice]:
    ratio, free = storage.used_ratio, storage.free_bytes
    if free is not None and free < LOW_FREE_BYTES:
        yield _warn(
            "storage.free",
            f"only {format_size(free)} free: too little for a meaningful run",
            "Free some space, or choose another --target.",
        )
    elif ratio is not None and ratio > FULL_RATIO:
        yield _warn(
            "storage.free",
            f"{ratio:.0%} full: allocation is scattered and SSDs slow down",
            "Free some space, or choose another --target.",
        )
    inodes, total = storage.inodes_free, storage.inodes_total
    if inodes is not None and total and inodes < total * (1 - FULL_RATIO):
        yield _warn(
            "storage.inodes", f"only {inodes} inodes free of {total}", "Remove small files."
        )


def _kind(storage: Storage) -> Iterator[Advice]:
    kind = storage.kind
    for trap in _TRAPS.get(kind or "unknown", ()):
        yield _note("storage.trap", trap)
    if storage.fs_type in _FS_TRAPS:
        yield _note("storage.trap", _FS_TRAPS[storage.fs_type])
    if kind in _KINDS:
        level, message, remedy = _KINDS[kind]
        yield Advice(level=level, subject="storage.kind", message=message, remedy=remedy)


def _options(storage: Storage) -> Iterator[Advice]:
    options = storage.mount_options
    if "ro" in options:
        yield _fail(
            "storage.options",
            "mounted read-only",
            f"As root: mount -o remount,rw {storage.mount_point}",
        )
    for option in options:
        meaning = _OPTIONS.get(option)
        if option.startswith("compress"):
            meaning = "Data is compressed: the size on the device is not the size of the file."
        if meaning:
            yield _warn("storage.options", f"mount option {option}", meaning)


def _device(storage: Storage) -> Iterator[Advice]:
    for leaf in storage.leaves():
        if leaf.rotational and leaf.type not in ("loop", "virtio"):
            yield _note(
                "storage.device", f"{leaf.disk} reports a rotating disk: many streams cost seeks"
            )
        if leaf.type == "loop" and leaf.loop_direct_io is False:
            yield _warn(
                "storage.device",
                f"{leaf.disk} is a loop device without direct I/O: its file is cached",
                f"As root: losetup --direct-io=on /dev/{leaf.disk}",
            )
        if leaf.type in ("zram", "ram"):
            yield _fail(
                "storage.device",
                f"{leaf.disk} is memory: nothing is durable",
                "Choose another --target.",
            )
        if leaf.iostats is False:
            yield _warn(
                "storage.device",
                f"{leaf.disk} keeps no counters: bytes written cannot be checked",
                f"As root: echo 1 > /sys/block/{leaf.disk}/queue/iostats",
            )


def _probes(probes: list[Probe]) -> Iterator[Advice]:
    for probe in probes:
        if not probe.ok:
            yield Advice(
                level="fail" if probe.needed else "warn",
                subject=f"probe.{probe.name}",
                message=f"{probe.name}: {probe.detail}",
                remedy=probe.remedy,
            )
