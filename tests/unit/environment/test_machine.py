"""CPU, memory, GPUs, io_uring and the fingerprint, from fictional text."""

from __future__ import annotations

import errno
import json
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.environment import (
    Machine,
    Storage,
    describe_machine,
    fingerprint,
    gpu,
    machine_fingerprint,
    memory,
)
from iobench.environment.blockdev import BlockDevice
from iobench.environment.gpu import (
    find_cufile,
    gds_state,
)
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.machine import Cpu, count_ranges, explain_refusal, parse_cpuinfo
from iobench.environment.memory import (
    ControlGroup,
    MachineMemory,
    available_bytes,
    describe_cgroup,
    host_takes_free_memory,
    new_pages_bytes_per_s,
    parse_meminfo,
)
from iobench.results.codec import from_plain, to_plain
from iobench.units import MIB

CPU = """processor : {n}
model name : Some CPU @ 2.00GHz
physical id : {socket}
core id : {core}
flags : fpu {flags}
"""


def test_cpuinfo() -> None:
    """Two sockets of two cores with two threads each are four cores. Without the name of a model
    (Arm), implementer and part replace it; the unknown topology is None."""
    cpus = [(s, c) for s in (0, 1) for c in (0, 1) for _ in "ht"]
    text = "\n".join(CPU.format(n=n, socket=s, core=c, flags="") for n, (s, c) in enumerate(cpus))
    intel = Cpu(model="Some CPU @ 2.00GHz", physical_cores=4, virtual=False)
    assert parse_cpuinfo(text) == intel
    found = parse_cpuinfo("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n")
    assert (found.model, found.physical_cores) == ("arm 0x41 part 0xd0c", None)


def test_small_files(tmp_path: Path) -> None:
    """The kernel's lists of ranges are counted. Kilobytes become bytes; huge pages are a count and
    stay one. A missing value of a kernel file is None, not an error."""
    assert [count_ranges(text) for text in ("0", "0-3", "0-3,8", None)] == [1, 4, 5, None]
    text = "MemTotal:  24 kB\nHugePages_Total:   3\nbroken\n"
    assert parse_meminfo(text) == {"MemTotal": 24 * 1024, "HugePages_Total": 3}
    (tmp_path / "word").write_text("max\n")
    assert read_text(tmp_path / "no") is None
    assert read_int(tmp_path / "word") is None
    assert read_text(tmp_path) is None


def _group(path: Path, **values: object) -> None:
    """Write files of a control group: `memory_max=7` is 7 in memory.max."""
    path.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (path / name.replace("_", ".", 1)).write_text(f"{value}\n")


_Proc = Callable[[str, str], None]


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Proc]:
    """Makes the files of /proc that name the control groups of this process."""

    def make(cgroup: str, mounts: str) -> None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/cgroup").write_text(cgroup)
        (tmp_path / "self/mountinfo").write_text(mounts)
        (tmp_path / "meminfo").write_text("MemAvailable: 9000 kB\n")
        memory._groups.cache_clear()

    monkeypatch.setattr(memory, "_PROC", tmp_path)
    yield make
    memory._groups.cache_clear()


_NO_LIMIT = 9223372036854771712


def test_memory_that_control_groups_leave(tmp_path: Path, proc: _Proc) -> None:
    """Version 2: the smallest value counts. File cache is available, memory of tmpfs is not. The
    lowest limit of nested groups is that of the process, for memory and for CPUs."""
    inner, outer = tmp_path / "cg/outer/inner", tmp_path / "cg/outer"
    mounted = f"1 0 0:1 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n"
    proc("0::/outer/inner\n", mounted)
    stat = "anon 1000\nfile 1700\nshmem 1000\ninactive_file 500\nactive_file 200"
    for group, values, left in (
        (inner, {}, 9000 << 10),
        (inner, {"memory_max": "max"}, 9000 << 10),
        (outer, {"memory_max": 5000}, 5000),
        (outer, {"memory_current": 3000, "memory_stat": stat}, 2700),
        (inner, {"memory_max": 100, "memory_current": 200}, 0),
    ):
        _group(group, **values)
        assert available_bytes() == left
    _group(inner, memory_max=6000, cpu_max="150000 100000")
    _group(outer, cpu_max="max 100000")
    assert describe_cgroup() == ControlGroup(memory_limit_bytes=5000, cpu_limit=1.5)


def test_memory_that_version_1_control_groups_leave(tmp_path: Path, proc: _Proc) -> None:
    """It is found by its controller. The sums over all groups below count; the huge number means
    no limit."""
    unified = f"1 0 0:1 / {tmp_path}/cg/unified rw - cgroup2 cgroup2 rw\n"
    mounted = f"2 0 0:2 / {tmp_path}/cg rw - cgroup cgroup rw,memory\n"
    proc("4:memory:/job\n1:cpu,cpuacct:/\n0::/\n", unified + mounted)
    assert memory._groups("memory") == [tmp_path / "cg/job", tmp_path / "cg"]
    _group(tmp_path / "cg/job", memory_limit_in_bytes=_NO_LIMIT, memory_usage_in_bytes=3000)
    assert available_bytes() == 9000 << 10
    assert describe_cgroup() == ControlGroup()
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 400\ntotal_active_file 100"
    _group(tmp_path / "cg/job", memory_limit_in_bytes=5000, memory_stat=stat)
    assert available_bytes() == 2500


def test_gpus_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's files have names, addresses and the version. The fingerprint has the names."""
    without = machine_fingerprint()
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path)
    (tmp_path / "gpus/0000:0f:00.0").mkdir(parents=True)
    text = "Model: \t\t NVIDIA H100\nIRQ:   \t 1\nBus Location: \t 0000:0F:00.0\n"
    (tmp_path / "gpus/0000:0f:00.0/information").write_text(text)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    (tmp_path / "version").write_text(version)
    machine = describe_machine()
    (found,) = machine.gpus
    assert (found.name, found.pci, found.driver) == ("NVIDIA H100", "0000:0f:00.0", "570.86.15")
    assert str(found) == "NVIDIA H100, driver 570.86.15"
    assert machine.fingerprint == machine_fingerprint() != without


def test_cufile_is_found_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of a CUDA wheel is found, also after unreadable entries of sys.path."""
    library = tmp_path / "nvidia/cufile/lib/libcufile.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    glob = Path.glob

    def guarded(self: Path, pattern: str) -> Any:
        if self.name == "forbidden":
            raise PermissionError(errno.EACCES, "Permission denied")
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", guarded)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "forbidden"), str(tmp_path)])
    assert find_cufile() == str(library)


_CUFILE = "/lib/libcufile.so"


@pytest.mark.parametrize(
    ("gpus", "driver", "library", "compatibility", "word", "remedied"),
    [
        (False, False, None, "", "no GPU", False),
        (False, True, None, "", "reports no GPU", True),
        (True, True, None, "", "libcufile", True),
        (True, True, _CUFILE, "no nvidia-fs", "(compatibility mode): no nvidia-fs", True),
        (True, True, _CUFILE, "", "all parts", False),
    ],
)
def test_state_of_gpudirect_storage(
    gpus: bool, driver: bool, library: str | None, compatibility: str, word: str, remedied: bool
) -> None:
    """Each missing part is named, with a remedy if there is one."""
    state, remedy = gds_state(
        gpus=gpus, driver=driver, library=library, compatibility=compatibility
    )
    assert word in state
    assert bool(remedy) is remedied


_COMMENTED = """
{   // NOTE : "use_pci_p2pdma": true
    "properties": {"force_compat_mode": false, "use_pci_p2pdma": %s}
}
"""


_NEITHER = "nvidia-fs is not loaded and PCI P2PDMA is not configured"


@pytest.mark.parametrize(
    ("module", "settings", "variables", "reason"),
    [
        (True, "{}", {}, ""),
        (False, "{}", {}, _NEITHER),
        (False, None, {}, _NEITHER),
        (False, _COMMENTED % "false", {}, _NEITHER),
        (False, _COMMENTED % "true", {}, ""),
        (False, "{}", {"CUFILE_USE_PCIP2PDMA": "true"}, ""),
        (False, _COMMENTED % "true", {"CUFILE_USE_PCIP2PDMA": "0"}, "nvidia-fs is not loaded"),
        (True, '{"properties": {"force_compat_mode": true}}', {}, "force_compat_mode"),
        (True, "{}", {"CUFILE_FORCE_COMPAT_MODE": "1"}, "force_compat_mode"),
    ],
)
def test_compatibility_mode(
    module: bool,
    settings: str | None,
    variables: dict[str, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuFile's settings and nvidia-fs decide. `doctor` and the writer `gds` say the same."""
    (tmp_path / "nvidia-fs").mkdir()
    monkeypatch.setattr(gpu, "_NVIDIA_FS", tmp_path / ("nvidia-fs" if module else "none"))
    if settings is not None:
        (tmp_path / "cufile.json").write_text(settings)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert reason in gpu.compatibility_mode()
    assert bool(reason) is bool(gpu.compatibility_mode())


@pytest.mark.parametrize(
    ("number", "sysctl", "word"),
    [
        (errno.ENOSYS, None, "the kernel has no io_uring"),
        (errno.EPERM, 1, "kernel.io_uring_disabled=1"),
        (errno.EPERM, 0, "seccomp"),
        (errno.EPERM, None, "seccomp"),
        (errno.ENOMEM, 0, "lockable memory"),
        (errno.EMFILE, 0, "EMFILE"),
    ],
)
def test_why_io_uring_is_refused(number: int, sysctl: int | None, word: str) -> None:
    """An old kernel, the sysctl, seccomp and a memory limit have different messages."""
    assert word in explain_refusal(number, sysctl)[0]


def test_the_running_machine_is_read_back_from_json() -> None:
    """The description of this machine is equal after JSON, and has the version of iobench."""
    from iobench import __version__

    machine = describe_machine()
    assert from_plain(Machine, json.loads(json.dumps(to_plain(machine)))) == machine
    assert machine.versions["iobench"] == __version__
    assert machine.memory.total_bytes


MACHINE = Machine(
    hostname="a",
    kernel_version="6.18",
    cpu=Cpu(model="C", usable_cpus=8),
    memory=MachineMemory(total_bytes=64 * 2**30),
)
DISK = BlockDevice(type="nvme", model="M", transport="pcie", scheduler="none", size_bytes=2**40)
STORAGE = Storage(kind="local", fs_type="xfs", free_bytes=1, device=DISK)


PRINTS = "3ad4d9e2e60f", "82905b0a3457", "5b31d6630e8e"
"""Of MACHINE, with STORAGE, and with a bucket."""


def test_fingerprints() -> None:
    """Host name, free space and a few MiB of memory do not change it. Every fact that makes figures
    incomparable does: of the machine, another model of disk in it, and a bucket name at another
    endpoint or another prefix. They are those of older releases: tuned writers name them."""
    same = replace(MACHINE, hostname="b", memory=MachineMemory(total_bytes=64 * 2**30 - 5 * MIB))
    assert fingerprint(same, replace(STORAGE, free_bytes=2)) == fingerprint(MACHINE, STORAGE)
    machines = [
        MACHINE,
        replace(MACHINE, cpu=replace(MACHINE.cpu, model="D")),
        replace(MACHINE, cpu=replace(MACHINE.cpu, usable_cpus=4)),
        replace(MACHINE, cgroup=ControlGroup(memory_limit_bytes=2**33)),
        replace(MACHINE, memory=MachineMemory(total_bytes=2**35)),
    ]
    store = Storage(kind="object store", fs_type="s3")
    places = [("http://a", "s3://b"), ("http://c", "s3://b"), ("http://a", "s3://b/d")]
    storages = [
        STORAGE,
        replace(STORAGE, device=replace(DISK, model="N")),
        *(replace(store, endpoint=endpoint, path=path) for endpoint, path in places),
    ]
    prints = [fingerprint(machine) for machine in machines]
    prints += [fingerprint(MACHINE, storage) for storage in storages]
    assert len({*prints}) == len(prints) == 10
    assert (prints[0], prints[5], prints[7]) == PRINTS


@pytest.mark.parametrize(
    ("features", "wanted"), [("01100101" + "0" * 56, True), ("0110100", False), ("", False)]
)
def test_free_memory_taken_by_the_host(features: str, wanted: bool, tmp_path: Path) -> None:
    """Bit 5 of the negotiated features of the balloon driver means that free pages are reported."""
    driver = tmp_path / "bus/virtio/drivers/virtio_balloon/virtio0"
    driver.mkdir(parents=True)
    (driver / "features").write_text(f"{features}\n")
    assert host_takes_free_memory(tmp_path) is wanted


def test_the_rate_of_new_pages_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes over the seconds, and every page is made."""
    times = iter((1.0, 3.0))
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(times))
    assert new_pages_bytes_per_s(4 * 2**20) == 2 * 2**20


def test_the_peak_of_a_block_has_that_of_its_operations() -> None:
    """Each of which begins a new maximum, as a save and a restore of one trial do."""
    with memory.PeakMemory() as measured:
        if memory.reset_peak() is None:
            pytest.skip("this kernel does not reset the maximum of the resident memory")
        large = mmap.mmap(-1, 64 * MIB)
        for page in range(0, len(large), mmap.PAGESIZE):
            large[page] = 1
        large.close()
        memory.reset_peak()
    assert measured.grown_bytes is not None
    assert measured.grown_bytes > 60 * MIB
