"""Memory: host memory for snapshots, which wait there until they are written.

MemoryTier: where its pages come from, DRAM, a NUMA node, or files in a directory.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iobench import linux
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import parse_meminfo
from iobench.errors import OptionError, UnavailableError
from iobench.units import KIB, parse_size
from iobench.writers.blocks.pages import Bytes, fresh_pages

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_HUGETLBFS = 0x958458F6  # linux/magic.h
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)


@dataclass(frozen=True)
class Memory:
    """Host memory of a Checkpointer for snapshots: up to `size` bytes (`"8GiB"`).

    - neither `node` nor `path`: memory as the process gets it (DRAM)
    - `node`: memory of this NUMA node; CXL memory is often a node without CPUs
    - `path`: a directory on tmpfs, hugetlbfs, or a file system that is mounted with DAX

    It is taken when snapshots need it, and freed with the Checkpointer or with the process, also
    after a kill: no file of it has a name. In a job of several ranks `size` is that of a node: each
    of its ranks has an equal share. Raises OptionError for values out of range.
    """

    size: int | str
    node: int | None = None
    path: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.size_bytes:
            raise OptionError("Memory: size must be at least 1 byte")
        if self.node is not None and (type(self.node) is not int or self.node < 0):
            raise OptionError(f"Memory: node={self.node!r}: the number of a NUMA node, 0 or more")
        if self.node is not None and self.path is not None:
            raise OptionError("Memory: give node or path, not both")

    @property
    def size_bytes(self) -> int:
        """The most that it may hold."""
        return parse_size(self.size, "size")

    def __str__(self) -> str:
        """Name of the tier in `Save.copies` and `loaded.sources`."""
        if self.path is not None:
            return f"memory of {self.path}"
        return "memory" if self.node is None else f"memory of node {self.node}"


class MemoryTier:
    """The memory that `options` describe. Raises OptionError when it does not exist here.

    Of `sharers` processes of this node that use it, each has an equal share of its size and of what
    is free.
    """

    def __init__(self, options: Memory, *, sharers: int = 1) -> None:
        self.name, self._sharers = str(options), sharers
        self._pages: _Dram | _Files
        if options.path is None:
            self._pages = _Dram(options.node)
        else:
            self._pages = _Files(Path(options.path))
        self.unit, self.shared, self.lazy = self._pages.unit, self._pages.shared, self._pages.lazy
        share = options.size_bytes // sharers
        self.size_bytes = share - share % self.unit
        if not self.size_bytes:
            least = self.unit * sharers
            raise OptionError(f"{self.name}: size must be at least {least} bytes there")

    def room_bytes(self, taken_bytes: int, missing_bytes: int) -> int:
        """Return the bytes that its size and its own limits leave.

        `taken_bytes` of it are mapped; `missing_bytes` of these have no pages yet.
        """
        left = self.size_bytes - taken_bytes
        free = self._pages.free_bytes()
        if free is not None:
            left = min(left, free // self._sharers - missing_bytes)
        return max(0, left)

    def new(self, size_bytes: int) -> Bytes | None:
        """Return memory of whole units, which is freed with its last array; None: there is none.

        Raises UnavailableError when the system refuses it for another reason.
        """
        try:
            return self._pages.new(size_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return None
            raise UnavailableError(
                self.name, f"it cannot be mapped: {error.strerror}.", "Use another memory tier."
            ) from error


class _Dram:
    """Private memory of the process, in huge pages where the kernel provides them.

    `shared` says whether pages count as memory of the system and of this process's control groups,
    `lazy` whether they are made at the first access.
    """

    unit, shared, lazy = linux.PAGE, True, True

    def __init__(self, node: int | None = None) -> None:
        self._node = node
        if node is not None and node not in (nodes := memory_nodes()):
            listed = ", ".join(map(str, nodes)) or "none"
            raise OptionError(
                f"Memory: node={node}: this machine has no such memory node: {listed}"
            )

    def free_bytes(self) -> int | None:
        """Return what its own limits leave; None without one."""
        if self._node is None:
            return None
        text = read_text(_NODES / f"node{self._node}/meminfo") or ""
        facts = parse_meminfo(text.replace(f"Node {self._node} ", ""))
        # With MPOL_BIND the kernel frees file cache of this node, and then kills: never go past it.
        names = ("MemFree", "Active(file)", "Inactive(file)")
        return sum(facts.get(name, 0) for name in names)

    def new(self, size_bytes: int) -> Bytes:
        memory = fresh_pages(size_bytes, huge=True)
        if self._node is not None:
            try:
                linux.bind_to_node(memory.ctypes.data, size_bytes, self._node)
            except OSError as error:
                raise UnavailableError(
                    f"memory of node {self._node}",
                    f"mbind failed: {error.strerror}.",
                    "Allow the node in the cpuset, and mbind in the seccomp filter.",
                ) from error
        return memory


class _Files:
    """Files without names in a directory whose files are memory: a kill leaves none behind."""

    lazy = False

    def __init__(self, directory: Path) -> None:
        where = f"Memory: path={str(directory)!r}"
        self._directory = directory
        try:
            is_directory = stat.S_ISDIR(directory.stat().st_mode)
            kind = linux.file_system_type(directory)
        except OSError as error:
            raise OptionError(f"{where}: {error.strerror}") from error
        if not is_directory:
            raise OptionError(f"{where}: must be a directory")
        if kind not in (linux.TMPFS, _HUGETLBFS) and not self._is_dax():
            raise OptionError(
                f"{where}: is storage, not memory; give a directory on tmpfs (/dev/shm), "
                "hugetlbfs, or a file system that is mounted with DAX"
            )
        # Reserved huge pages and DAX are neither available memory nor in the group.
        self.shared, self._huge = kind == linux.TMPFS, kind == _HUGETLBFS
        self.unit = os.statvfs(directory).f_bsize if self._huge else linux.PAGE

    def _is_dax(self) -> bool:
        try:
            fd = self._open()
        except OSError:  # it takes no files without names, or none of this user
            return False
        try:
            return linux.is_dax(fd)
        finally:
            os.close(fd)

    def _open(self) -> int:
        return os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def free_bytes(self) -> int | None:
        found = os.statvfs(self._directory)
        free = found.f_bavail * found.f_frsize if found.f_blocks else None  # 0: no limit
        if not self._huge:
            return free
        pool = _HUGE_PAGES / f"hugepages-{self.unit // KIB}kB"
        pages = (read_int(pool / "free_hugepages") or 0) - (read_int(pool / "resv_hugepages") or 0)
        return min(pages * self.unit, pages * self.unit if free is None else free)

    def new(self, size_bytes: int) -> Bytes:
        fd = self._open()
        try:
            # Now, and not at the first access, which cannot fail but by SIGBUS.
            linux.fallocate(fd, 0, size_bytes)
            memory: Bytes = np.asarray(_Mapping(fd, size_bytes))
        finally:
            os.close(fd)
        return memory


class _Mapping:
    """A mapped file. The arrays on it keep it alive; with the last one it is unmapped."""

    def __init__(self, fd: int, length: int) -> None:
        self._length = 0
        flags = mmap.MAP_SHARED | linux.MAP_NORESERVE | mmap.MAP_POPULATE
        self._address = linux.map_memory(None, length, _READ_WRITE, flags, fd)
        self._length = length
        self.__array_interface__ = linux.array_interface(self._address, length)

    def __del__(self) -> None:
        if self._length:
            linux.unmap_memory(self._address, self._length)


def memory_nodes(directory: Path = _NODES) -> list[int]:
    """Return the NUMA nodes that have memory; `0-1,3` in the kernel's list."""
    nodes: list[int] = []
    for part in (read_text(directory / "has_memory") or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes.extend(range(int(first), int(last or first) + 1))
    return nodes
