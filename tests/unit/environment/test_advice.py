"""The rules of `iobench doctor`, for fictional machines and storage."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from iobench.environment import Advice, Probe, advise
from iobench.units import GIB

MACHINE: dict[str, Any] = {
    "cpu": {"governor": "performance"},
    "memory": {"available_bytes": 64 * GIB},
    "cgroup": {"memory_limit_bytes": None},
    "versions": {"fio": "3.33", "torch": "2.13.0"},
    "io_uring": {"works": True, "reason": "", "remedy": ""},
    "gds": {"state": "no GPU", "remedy": ""},
}
DEVICE: dict[str, Any] = {
    "disk": "nvme0n1",
    "type": "nvme",
    "rotational": False,
    "loop_direct_io": None,
    "iostats": True,
    "backing": [],
}
STORAGE: dict[str, Any] = {
    "kind": "local",
    "fs_type": "xfs",
    "mount_point": "/data",
    "mount_options": ["rw", "noatime"],
    "free_bytes": 500 * GIB,
    "used_ratio": 0.5,
    "inodes_free": 1000,
    "inodes_total": 2000,
    "device": DEVICE,
}


def changed(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of `base` with the field at a dotted path set."""
    copied = copy.deepcopy(base)
    *parents, last = path.split(".")
    inner = copied
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return copied


def worse(advice: list[Advice]) -> list[tuple[str, str]]:
    """Return level and subject of all advice above the level of a note."""
    return [(item.level, item.subject) for item in advice if item.level != "note"]


@pytest.mark.parametrize(("machine", "storage"), [({}, {}), ({}, {"device": None}),
                                                  ({"cpu": {"governor": None}}, {})])  # fmt: skip
def test_nothing_is_wrong_with_a_good_machine(
    machine: dict[str, Any], storage: dict[str, Any]
) -> None:
    """A fast disk, enough memory and all tools: no warning, only the traps of a disk. Virtual
    machines have no governor, network file systems no device, and that is not an error."""
    advice = advise(MACHINE | machine, STORAGE | storage, [])
    assert worse(advice) == []
    assert {item.subject for item in advice} == {"storage.trap"}


@pytest.mark.parametrize(
    ("path", "value", "level", "subject", "remedy"),
    [
        ("cpu.governor", "powersave", "warn", "cpu.governor", "cpupower"),
        ("memory.available_bytes", GIB, "warn", "memory", "--size"),
        ("cgroup.memory_limit_bytes", GIB, "warn", "memory", "--size"),
        ("memory.host_takes_free_memory", True, "warn", "memory.pages", "balloon"),
        ("versions.fio", None, "warn", "fio", "apt-get install fio"),
        ("versions.torch", None, "fail", "torch", "pip install torch"),
        ("io_uring", {"works": False, "reason": "no", "remedy": "do"}, "warn", "io_uring", "do"),
        ("gds", {"state": "x", "remedy": "modprobe"}, "warn", "gds", "modprobe"),
        ("used_ratio", 0.95, "warn", "storage.free", ""),
        ("free_bytes", GIB, "warn", "storage.free", ""),
        ("inodes_free", 100, "warn", "storage.inodes", ""),
        ("kind", "network", "warn", "storage.kind", ""),
        ("kind", "fuse", "warn", "storage.kind", ""),
        ("kind", "tmpfs", "fail", "storage.kind", ""),
        ("kind", "unknown", "warn", "storage.kind", ""),
        ("mount_options", ["ro"], "fail", "storage.options", ""),
        ("mount_options", ["rw", "sync"], "warn", "storage.options", ""),
        ("mount_options", ["rw", "barrier=0"], "warn", "storage.options", ""),
        ("mount_options", ["rw", "data=journal"], "warn", "storage.options", ""),
        ("mount_options", ["rw", "compress=zstd:3"], "warn", "storage.options", ""),
        ("device.iostats", False, "warn", "storage.device", ""),
        ("device.type", "zram", "fail", "storage.device", ""),
    ],
)
def test_rules(path: str, value: object, level: str, subject: str, remedy: str) -> None:
    """Each problem of a machine and of a storage is reported once, at its level, with its
    remedy."""
    of_machine = path.split(".")[0] in MACHINE
    machine = changed(MACHINE, path, value) if of_machine else MACHINE
    advice = advise(machine, STORAGE if of_machine else changed(STORAGE, path, value), [])
    assert worse(advice) == [(level, subject)]
    assert remedy in next(item.remedy for item in advice if item.subject == subject)


def test_a_full_file_system_with_no_room_is_said_once() -> None:
    """Too little space is worse, and is reported instead of the ratio."""
    storage = changed(changed(STORAGE, "free_bytes", GIB), "used_ratio", 0.99)
    assert worse(advise(MACHINE, storage, [])) == [("warn", "storage.free")]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("kind", "network", "Close-to-open"),
        ("kind", "network", "server's"),
        ("kind", "network", "COMMIT"),
        ("kind", "fuse", "writeback_cache"),
        ("kind", "fuse", "DIRECT_IO"),
        ("kind", "tmpfs", "durable"),
        ("kind", "overlay", "copies the whole file up"),
        ("kind", "overlay", "upper directory"),
        ("kind", "local", "dirty limit"),
        ("fs_type", "btrfs", "checksums"),
        ("fs_type", "zfs", "ARC"),
    ],
)
def test_traps_of_each_kind(field: str, value: str, word: str) -> None:
    """The traps of a kind of storage, and of a file system, are always listed."""
    advice = advise(MACHINE, changed(STORAGE, field, value), [])
    assert any(word in item.message for item in advice if item.subject == "storage.trap")


def test_loop_device_through_the_page_cache() -> None:
    """A loop device without direct I/O has a warning with its name, also below a stack."""
    loop = DEVICE | {"type": "loop", "disk": "loop3", "loop_direct_io": False}
    for device in (loop, DEVICE | {"type": "dm-crypt", "backing": [loop]}):
        advice = advise(MACHINE, changed(STORAGE, "device", device), [])
        assert worse(advice) == [("warn", "storage.device")]
        assert any("losetup --direct-io=on /dev/loop3" in item.remedy for item in advice)


def test_failed_probes_become_advice() -> None:
    """A needed probe is a failure, one with an alternative a warning, a harmless one a note."""
    probes = [
        Probe(name="a", ok=True, detail="fine"),
        Probe(name="b", ok=False, detail="EIO", remedy="repair"),
        Probe(name="c", ok=False, detail="EPERM", needed=False),
        Probe(name="drop_caches", ok=False, detail="EACCES", needed=False),
    ]
    advice = advise(MACHINE, STORAGE, probes)
    assert worse(advice) == [("fail", "probe.b"), ("warn", "probe.c")]
    assert next(item.remedy for item in advice if item.subject == "probe.b") == "repair"
