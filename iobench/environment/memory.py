"""Memory, swap, control-group limits and settings of the page cache. All sizes are in bytes."""

from __future__ import annotations

import functools
import mmap
import resource
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from iobench.environment.facts import joined, size_of
from iobench.environment.kernelfs import read_int, read_text, selected
from iobench.environment.mounts import parse_mountinfo
from iobench.units import MIB

_PROC = Path("/proc")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_REPORTING = 5  # linux/virtio_balloon.h
_UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number near 2**63


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Memory and swap of a machine, and the limits of this process.

    `new_pages_bytes_per_s` is measured by `iobench doctor` only.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    dirty_bytes: int | None = None
    cached_bytes: int | None = None
    hugepages_total: int | None = None
    memlock_limit_bytes: int | None = None
    open_files_limit: int | None = None
    host_takes_free_memory: bool | None = None
    new_pages_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The lowest limits of the control groups of this process; None means no limit."""

    memory_limit_bytes: int | None = None
    cpu_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class PageCache:
    """The settings of the page cache, by their names under /proc/sys/vm."""

    dirty_ratio: int | None = None
    dirty_background_ratio: int | None = None
    dirty_bytes: int | None = None
    dirty_background_bytes: int | None = None
    dirty_expire_centisecs: int | None = None
    dirty_writeback_centisecs: int | None = None
    swappiness: int | None = None
    overcommit_memory: int | None = None
    transparent_hugepage: str | None = None

    def __str__(self) -> str:
        """The limits in force: bytes if they are set, else percent of available memory."""
        soft = size_of(self.dirty_background_bytes) or f"{self.dirty_background_ratio}%"
        return joined(
            f"{soft} background", f"{size_of(self.dirty_bytes) or f'{self.dirty_ratio}%'} hard"
        )


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo to {name: bytes}; lines without a unit are counts."""
    facts: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return facts


def describe_memory() -> MachineMemory:
    """Describe total and available memory, swap, dirty pages and the limits of this process."""
    facts = parse_meminfo(read_text("/proc/meminfo") or "")
    return MachineMemory(
        total_bytes=facts.get("MemTotal"),
        available_bytes=facts.get("MemAvailable"),
        swap_total_bytes=facts.get("SwapTotal"),
        swap_free_bytes=facts.get("SwapFree"),
        dirty_bytes=facts.get("Dirty"),
        cached_bytes=facts.get("Cached"),
        hugepages_total=facts.get("HugePages_Total"),
        memlock_limit_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files_limit=_limit(resource.RLIMIT_NOFILE),
        host_takes_free_memory=host_takes_free_memory(),
    )


def available_bytes() -> int | None:
    """Return the memory that can be allocated without swapping or the OOM killer; None if unknown.

    It is the minimum of MemAvailable and of what each control group of this process leaves of its
    limit. As in MemAvailable, file cache counts as available and memory of tmpfs does not.
    """
    facts = parse_meminfo(read_text(_PROC / "meminfo") or "")
    found = (facts.get("MemAvailable"), *map(_left_of_limit, _groups("memory")))
    return min((left for left in found if left is not None), default=None)


def memory_stall_s() -> float | None:
    """Return the seconds since boot in which some task waited for memory; None without PSI.

    Documentation/accounting/psi.rst: `total` is in microseconds.
    """
    for line in (read_text("/proc/pressure/memory") or "").splitlines():
        kind, *words = line.split()
        totals = [word.removeprefix("total=") for word in words if word.startswith("total=")]
        if kind == "some" and totals and totals[0].isdigit():
            return int(totals[0]) / 1e6
    return None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def new_pages_bytes_per_s(size_bytes: int = 256 * MIB) -> float:
    """Return how fast the kernel makes small pages of new memory, measured once.

    Page-cache paths need one for each 4 KiB that they save. Where the host of a virtual machine
    takes free memory, it must first give it back: 0.5 GiB/s was seen.
    """
    page = mmap.PAGESIZE
    with mmap.mmap(-1, size_bytes) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        began = time.perf_counter()
        for start in range(0, size_bytes, page):
            memory[start] = 1
        return size_bytes / (time.perf_counter() - began)


@functools.cache
def host_takes_free_memory(sysfs: Path = Path("/sys")) -> bool:
    """Whether this virtual machine returns its free memory to the host (free page reporting).

    Large free blocks are returned, so fresh huge pages are slow: the host must allocate memory for
    them again. Read from the negotiated features of the balloon driver
    (VIRTIO_BALLOON_F_REPORTING).
    """
    found = sysfs.glob("bus/virtio/drivers/virtio_balloon/virtio*/features")
    return any((read_text(features) or "")[_REPORTING:][:1] == "1" for features in found)


def describe_page_cache() -> PageCache:
    names = [one.name for one in fields(PageCache) if one.name != "transparent_hugepage"]
    settings = {name: read_int(f"/proc/sys/vm/{name}") for name in names}
    huge = read_text("/sys/kernel/mm/transparent_hugepage/enabled")
    return PageCache(**settings, transparent_hugepage=selected(huge))


@functools.cache
def _groups(controller: str) -> list[Path]:
    """Return the directories whose limits of `controller` apply to this process, innermost first.

    They are looked up once. A version 1 hierarchy names its controllers in /proc/self/cgroup,
    version 2 has an empty field; if both are mounted, the one with the controller wins.
    """
    mounts = parse_mountinfo(read_text(_PROC / "self/mountinfo") or "")
    lines = (read_text(_PROC / "self/cgroup") or "").splitlines()
    for line in sorted(lines, key=lambda line: line.startswith("0::")):
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for mount in mounts:
            v1 = mount.fs_type == "cgroup" and controller in mount.super_options
            if not (v1 if names else mount.fs_type == "cgroup2"):
                continue
            top = Path(mount.mount_point)
            inside = path.removeprefix(mount.root.rstrip("/")).strip("/")
            here = top / inside
            within = [here, *here.parents]
            return within[: within.index(top) + 1]
    return []


def describe_cgroup() -> ControlGroup:
    """Return the lowest memory limit (bytes) and CPU limit (CPUs) of this process's control groups.

    Outer groups that a container hides are not visible.
    """
    memory = [
        value
        for directory in _groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (value := read_int(directory / name)) is not None and value < _UNLIMITED
    ]
    cpus = [limit for one in _groups("cpu") if (limit := _cpu_limit(one)) is not None]
    return ControlGroup(
        memory_limit_bytes=min(memory, default=None), cpu_limit=min(cpus, default=None)
    )


def _left_of_limit(group: Path) -> int | None:
    """Return the bytes that a control group's processes may still allocate; None without limit."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = read_int(group / limit_name)
        if limit is not None and limit < _UNLIMITED:
            lines = (line.split() for line in (read_text(group / "memory.stat") or "").splitlines())
            cache = {f"{prefix}inactive_file", f"{prefix}active_file"}
            cached = sum(int(words[1]) for words in lines if words[0] in cache)
            return max(0, limit - (read_int(group / used_name) or 0) + cached)
    return None


def _cpu_limit(directory: Path) -> float | None:
    words = (read_text(directory / "cpu.max") or "").split()
    if len(words) == 2:
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota = read_int(directory / "cpu.cfs_quota_us")
    period = read_int(directory / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


class PeakMemory:
    """Measures the maximum growth of this process's resident memory within the block.

    `grown_bytes` is None if the kernel does not permit to reset the maximum. The block may measure
    single operations by `reset_peak`: their maximum counts too.
    """

    grown_bytes: int | None = None

    def __enter__(self) -> Self:
        self._before, self._most = reset_peak(), 0
        _measuring.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _measuring.remove(self)
        self.note()
        if self._before is not None and self._most:
            self.grown_bytes = max(0, self._most - self._before)

    def note(self) -> None:
        """Take the maximum since the last reset into account."""
        self._most = max(self._most, peak_bytes() or 0)


_measuring: list[PeakMemory] = []


def reset_peak() -> int | None:
    """Begin a new maximum of this process's resident memory, and return that memory now.

    Writing "5" to /proc/self/clear_refs resets VmHWM to VmRSS (proc(5)); the kernel updates VmHWM
    anyway, so no later access is slower. None if that is not permitted.
    """
    for one in _measuring:
        one.note()
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return None
    return _own("VmRSS")


def peak_bytes() -> int | None:
    """Return the maximum of this process's resident memory since `reset_peak`."""
    return _own("VmHWM")


def private_bytes() -> int | None:
    """Return the resident memory of this process that is neither of files nor shared."""
    return _own("RssAnon")


def _own(field: str) -> int | None:
    return parse_meminfo(read_text(Path("/proc/self/status")) or "").get(field)
