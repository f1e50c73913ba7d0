"""The rules of `iobench doctor`, for fictional machines and storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from iobench.environment import Advice, Machine, Probe, Storage, advise
from iobench.environment.blockdev import BlockDevice
from iobench.environment.gpu import Gds
from iobench.environment.machine import Cpu, IoUring
from iobench.environment.memory import MachineMemory
from iobench.units import GIB

MACHINE = Machine(
    cpu=Cpu(governor="performance"),
    memory=MachineMemory(available_bytes=64 * GIB),
    versions={"fio": "3.33", "torch": "2.13.0"},
    io_uring=IoUring(works=True),
    gds=Gds(state="no GPU"),
)
DEVICE = BlockDevice(disk="nvme0n1", type="nvme", rotational=False, iostats=True)
STORAGE = Storage(
    kind="local",
    fs_type="xfs",
    mount_point="/data",
    mount_options=("rw", "noatime"),
    free_bytes=500 * GIB,
    used_ratio=0.5,
    inodes_free=1000,
    inodes_total=2000,
    device=DEVICE,
)


def changed(base: Any, path: str, value: object) -> Any:
    """Return a copy of `base` with the field at a dotted path set."""
    name, _, rest = path.partition(".")
    inner = getattr(base, name)
    if isinstance(inner, dict):
        return replace(base, **{name: {**inner, rest: value}})
    return replace(base, **{name: changed(inner, rest, value) if rest else value})


def worse(advice: list[Advice]) -> list[tuple[str, str]]:
    """Return level and subject of all advice above the level of a note."""
    return [(item.level, item.subject) for item in advice if item.level != "note"]


def test_nothing_is_wrong_with_a_good_machine() -> None:
    """A fast disk, enough memory and all tools: no warning, only the traps of a disk. Virtual
    machines have no governor, network file systems no device, and that is not an error."""
    for machine in (MACHINE, replace(MACHINE, cpu=Cpu())):
        for storage in (STORAGE, replace(STORAGE, device=None)):
            advice = advise(machine, storage, [])
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
        ("io_uring", IoUring(reason="no", remedy="do"), "warn", "io_uring", "do"),
        ("gds", Gds(state="x", remedy="modprobe"), "warn", "gds", "modprobe"),
        ("used_ratio", 0.95, "warn", "storage.free", ""),
        ("free_bytes", GIB, "warn", "storage.free", ""),
        ("inodes_free", 100, "warn", "storage.inodes", ""),
        ("kind", "network", "warn", "storage.kind", ""),
        ("kind", "fuse", "warn", "storage.kind", ""),
        ("kind", "tmpfs", "fail", "storage.kind", ""),
        ("kind", "unknown", "warn", "storage.kind", ""),
        ("mount_options", ("ro",), "fail", "storage.options", ""),
        *(
            ("mount_options", ("rw", option), "warn", "storage.options", "")
            for option in ("sync", "barrier=0", "data=journal", "compress=zstd:3")
        ),
        ("device.iostats", False, "warn", "storage.device", ""),
        ("device.type", "zram", "fail", "storage.device", ""),
    ],
)
def test_rules(path: str, value: object, level: str, subject: str, remedy: str) -> None:
    """Each problem of a machine and of a storage is reported once, at its level, with its
    remedy."""
    of_machine = hasattr(MACHINE, path.split(".")[0])
    machine = changed(MACHINE, path, value) if of_machine else MACHINE
    advice = advise(machine, STORAGE if of_machine else changed(STORAGE, path, value), [])
    assert worse(advice) == [(level, subject)]
    assert remedy in next(item.remedy for item in advice if item.subject == subject)


def test_a_full_file_system_with_no_room_is_said_once() -> None:
    """Too little space is worse, and is reported instead of the ratio."""
    storage = changed(changed(STORAGE, "free_bytes", GIB), "used_ratio", 0.99)
    assert worse(advise(MACHINE, storage, [])) == [("warn", "storage.free")]


def test_traps_of_each_kind() -> None:
    """The traps of a kind of storage, and of a file system, are always listed."""
    for field, value, words in (
        ("kind", "network", ("Close-to-open", "server's", "COMMIT")),
        ("kind", "fuse", ("writeback_cache", "DIRECT_IO")),
        ("kind", "tmpfs", ("durable",)),
        ("kind", "overlay", ("copies the whole file up", "upper directory")),
        ("kind", "local", ("dirty limit",)),
        ("fs_type", "btrfs", ("checksums",)),
        ("fs_type", "zfs", ("ARC",)),
    ):
        advice = advise(MACHINE, changed(STORAGE, field, value), [])
        traps = " ".join(item.message for item in advice if item.subject == "storage.trap")
        assert all(word in traps for word in words), value


def test_loop_device_through_the_page_cache() -> None:
    """A loop device without direct I/O has a warning with its name, also below a stack."""
    loop = replace(DEVICE, type="loop", disk="loop3", loop_direct_io=False)
    for device in (loop, replace(DEVICE, type="dm-crypt", backing=(loop,))):
        advice = advise(MACHINE, replace(STORAGE, device=device), [])
        assert worse(advice) == [("warn", "storage.device")]
        assert any("losetup --direct-io=on /dev/loop3" in item.remedy for item in advice)


def test_failed_probes_become_advice() -> None:
    """A needed probe is a failure, one with an alternative a warning."""
    probes = [
        Probe(name="a", ok=True, detail="fine"),
        Probe(name="b", ok=False, detail="EIO", remedy="repair"),
        Probe(name="c", ok=False, detail="EPERM", needed=False),
    ]
    advice = advise(MACHINE, STORAGE, probes)
    assert worse(advice) == [("fail", "probe.b"), ("warn", "probe.c")]
    assert next(item.remedy for item in advice if item.subject == "probe.b") == "repair"
