"""Backing: where the pages of a memory tier come from. DRAM, a NUMA node, files, a DAX device."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from iobench import linux
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import parse_meminfo
from iobench.errors import OptionError, UnavailableError
from iobench.remote.memory import Memory
from iobench.units import KIB
from iobench.writers.blocks.pages import HUGE_PAGE

__all__ = ["Backing", "DaxDevice", "Dram", "Files", "FreeRanges", "backing_of"]


class FreeRanges:
    """Gives out ranges of `size_bytes`, the first one that is large enough. Any thread may call."""

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)]  # (start, stop) in order, never adjacent
        self._lock = threading.RLock()  # a finalizer may give a range back in the middle of `take`

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        with self._lock:
            return max((stop - start for start, stop in self._free), default=0)

    def take(self, size_bytes: int) -> int | None:
        """Return the start of a range that is taken now; None when no free range is as large."""
        with self._lock:
            for number, (start, stop) in enumerate(self._free):
                if stop - start >= size_bytes:
                    rest = start + size_bytes
                    self._free[number : number + 1] = [(rest, stop)] if rest < stop else []
                    return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Make a range free that was taken."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, end in sorted([*self._free, (start, start + size_bytes)]):
                if merged and merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((begin, end))
            self._free = merged


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_HUGETLBFS = 0x958458F6  # linux/magic.h
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


class Backing(Protocol):
    """Memory that can be mapped in pieces of whole `unit` bytes."""

    unit: int
    shared: bool
    """Whether its pages count as memory of the system and of this process's control groups."""
    lazy: bool
    """Whether the pages are made at the first access, and not by `map_at`."""

    def free_bytes(self) -> int | None:
        """Return what its own limits leave; None without one."""

    def map_at(self, address: int, length: int) -> Callable[[], None] | None:
        """Map `length` bytes at `address`, in place of what is mapped there.

        Returns a call for after they are unmapped, if there is anything to do. Raises OSError:
        ENOMEM or ENOSPC when there is no room; then the range has no memory.
        """

    def close(self) -> None:
        """Release it. What is mapped stays mapped."""


def backing_of(options: Memory) -> Backing:
    """Return the backing of a tier. Raises OptionError when there is no such memory here."""
    if options.path is None:
        return Dram(options.node)
    path = Path(options.path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise OptionError(f"Memory: path={str(path)!r}: {error.strerror}") from error
    if stat.S_ISCHR(mode):
        return DaxDevice(path)
    if not stat.S_ISDIR(mode):
        raise OptionError(f"Memory: path={str(path)!r}: must be a directory or a DAX device")
    return Files(path)


class Dram:
    """Private memory of the process, in huge pages where the kernel provides them."""

    unit, shared, lazy = linux.PAGE, True, True

    def __init__(self, node: int | None = None) -> None:
        self._node = node
        if node is not None and node not in (nodes := memory_nodes()):
            listed = ", ".join(map(str, nodes)) or "none"
            raise OptionError(
                f"Memory: node={node}: this machine has no such memory node: {listed}"
            )

    def free_bytes(self) -> int | None:
        if self._node is None:
            return None
        text = read_text(_NODES / f"node{self._node}/meminfo") or ""
        facts = parse_meminfo(text.replace(f"Node {self._node} ", ""))
        # With MPOL_BIND the kernel frees file cache of this node, and then kills: never go past it.
        names = ("MemFree", "Active(file)", "Inactive(file)")
        return sum(facts.get(name, 0) for name in names)

    def map_at(self, address: int, length: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | linux.MAP_FIXED
        linux.map_memory(address, length, _READ_WRITE, flags)
        if whole := length - length % HUGE_PAGE:
            linux.advise_huge(address, whole, huge=True)
        if self._node is not None:
            try:
                linux.bind_to_node(address, length, self._node)
            except OSError as error:
                raise UnavailableError(
                    f"memory of node {self._node}",
                    f"mbind failed: {error.strerror}.",
                    "Allow the node in the cpuset, and mbind in the seccomp filter.",
                ) from error

    def close(self) -> None:
        """Nothing is open."""


class Files:
    """Files without names in a directory on tmpfs or hugetlbfs: a kill leaves none behind."""

    lazy = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        kind = linux.file_system_type(directory)
        if kind not in (linux.TMPFS, _HUGETLBFS):
            raise OptionError(
                f"Memory: path={str(directory)!r}: is storage, not memory; give a directory on "
                "tmpfs (/dev/shm) or hugetlbfs, or a DAX device"
            )
        self.shared = (
            kind == linux.TMPFS
        )  # reserved huge pages are neither available nor in the group
        self.unit = linux.PAGE if self.shared else os.statvfs(directory).f_bsize

    def free_bytes(self) -> int | None:
        found = os.statvfs(self._directory)
        free = found.f_bavail * found.f_frsize if found.f_blocks else None  # 0: no limit
        if self.shared:
            return free
        pool = _HUGE_PAGES / f"hugepages-{self.unit // KIB}kB"
        pages = (read_int(pool / "free_hugepages") or 0) - (read_int(pool / "resv_hugepages") or 0)
        return min(pages * self.unit, pages * self.unit if free is None else free)

    def map_at(self, address: int, length: int) -> None:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(self._directory, flags, 0o600)
        try:
            # Now, and not at the first access, which cannot fail but by SIGBUS.
            linux.fallocate(fd, 0, length)
            flags = mmap.MAP_SHARED | linux.MAP_FIXED | linux.MAP_NORESERVE | mmap.MAP_POPULATE
            linux.map_memory(address, length, _READ_WRITE, flags, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is open."""


class DaxDevice:
    """Memory behind a character device. One process at a time uses it."""

    shared, lazy = False, True

    def __init__(self, path: Path) -> None:
        number = path.stat().st_rdev
        facts = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")
        size = read_int(facts / "size")
        if size is None or (facts / "subsystem").resolve().name != "dax":
            raise OptionError(f"Memory: path={str(path)!r}: is not a DAX device")
        self.unit = max(read_int(facts / "align") or HUGE_PAGE, linux.PAGE)
        self._free = FreeRanges(size - size % self.unit)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise OptionError(f"Memory: path={str(path)!r}: another process uses it") from error

    def free_bytes(self) -> int | None:
        return self._free.largest

    def map_at(self, address: int, length: int) -> Callable[[], None]:
        offset = self._free.take(length)
        if offset is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            flags = mmap.MAP_SHARED | linux.MAP_FIXED
            linux.map_memory(address, length, _READ_WRITE, flags, self._fd, offset)
        except BaseException:
            self._free.give(offset, length)
            raise
        return lambda: self._free.give(offset, length)

    def close(self) -> None:
        """Let another process use it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def memory_nodes(directory: Path = _NODES) -> list[int]:
    """Return the NUMA nodes that have memory; `0-1,3` in the kernel's list."""
    nodes: list[int] = []
    for part in (read_text(directory / "has_memory") or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes.extend(range(int(first), int(last or first) + 1))
    return nodes
