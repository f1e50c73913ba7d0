"""Memory: host memory for snapshots, which wait there until they are written.

MemoryTier: where its pages come from, DRAM, a NUMA node, or files in a directory.
MemoryPool: the slots of a Checkpointer with memory tiers. Each is made when a save needs it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from iobench import linux
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import available_bytes, parse_meminfo
from iobench.errors import OptionError, StateError, UnavailableError
from iobench.units import GIB, KIB, format_size, parse_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage

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


def memory_nodes() -> list[int]:
    """Return the NUMA nodes that have memory; `0-1,3` in the kernel's list."""
    nodes: list[int] = []
    for part in (read_text(_NODES / "has_memory") or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


_MOST_SLOTS = 512
"""Each is one or more mappings, of which a process has a limited number."""
_SPARE_PART, _MOST_SPARE = 8, GIB
"""An eighth of the memory that is available at the start, 1 GiB at most, is left to others."""


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """A memory tier now, in bytes.

    `used_bytes` are snapshots that are not written yet. `free_bytes` can take more of them, by its
    size and all limits.
    """

    tier: str
    size_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A committed checkpoint whose bytes are in a slot, until another snapshot takes it.

    `files` gets the memory of the slot, and returns what it has of the checkpoint. `manifest` is
    that of a checkpoint of one process.
    """

    step: int
    serial: int
    files: Callable[[Bytes], list[FileImage]]
    manifest: Manifest | None = None


class MemorySlot(Slot):
    """A slot in the memory tier of this name.

    `save` is the save that took it last. `kept` is set once this save is committed. `lazy`: its
    pages are made at the first access.
    """

    def __init__(self, memory: Bytes, tier: str, *, lazy: bool) -> None:
        super().__init__()
        self._use(memory)
        self.tier, self.busy, self._lazy = tier, False, lazy
        self.save: Save | None = None
        self.kept: Kept | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes without pages; pages are made from the begin to the end."""
        last = self.memory.ctypes.data + len(self.memory) - 1
        return len(self.memory) if self._lazy and not linux.has_page(last) else 0

    def free(self) -> None:
        self.kept, self.save = None, None
        super().free()


class MemoryPool(SlotPool):
    """As many slots as the memory tiers hold. A slot is in the first tier with room for it.

    Before a slot is made, the free bytes of control groups, the system, tmpfs, huge pages and the
    node are counted. A tier without room is left out, so a limit that is lowered means fewer new
    slots. `count` is how many there are and could be now, 512 at most. No lock, for the reasons of
    SlotPool: what is taken is counted in the slots that exist. Of `sharers` processes of this node
    each takes an equal share of the available memory at most.
    """

    def __init__(
        self, tiers: Sequence[MemoryTier], *, sharers: int = 1, alone: bool = True
    ) -> None:
        """With `alone`, `grow` counts the slots; otherwise `count` stays until `counted`."""
        super().__init__(1)
        self.counts_alone = alone
        self._free.clear()
        self.tiers, self._sharers = list(tiers), sharers
        self._unit = max(linux.PAGE, *(tier.unit for tier in tiers))
        self._spare = min((available_bytes() or 0) // _SPARE_PART, _MOST_SPARE)
        self._counted = 0

    def slots(self) -> list[MemorySlot]:
        """Return the slots that have memory: those made first are in the fastest. In any thread."""
        return [slot for slot in cast(list[MemorySlot], self._existing()) if len(slot.memory)]

    def counted(self, size_bytes: int) -> int:
        """Return how many slots of `size_bytes` there are or could be, 512 at most.

        If a slot is free, that is the last count. Raises StateError when there is no room for a
        single one.
        """
        size_bytes = max(size_bytes, 1)
        if size_bytes > self._size or not self._free:
            if size_bytes > self._size:
                self._size = -(-size_bytes // self._unit) * self._unit
                self.free()  # they are too small
            more = sum(room // self._size for room in self._rooms())
            self._counted = min(_MOST_SLOTS, len(self.slots()) + more)
            if not self._counted:
                raise StateError(self.too_large())
        return self._counted

    @property
    def frees_more(self) -> bool:
        return any(slot.busy for slot in self.slots())

    def too_large(self) -> str:
        """Return the sizes of a snapshot and of the tiers, for an error."""
        tiers = ", ".join(
            f"{format_size(tier.size_bytes)} of {tier.name} ({format_size(room)} available)"
            for tier, room in zip(self.tiers, self._rooms(), strict=True)
        )
        return (
            f"a snapshot of {format_size(self._size)} does not fit the memory tiers: {tiers}; use "
            "larger tiers, or save() in place of save_async()"
        )

    def _rooms(self) -> list[int]:
        """Return the bytes that each tier has left for new slots."""
        taken, missing = dict[str, int](), dict[str, int]()
        for slot in self.slots():
            taken[slot.tier] = taken.get(slot.tier, 0) + len(slot.memory)
            missing[slot.tier] = missing.get(slot.tier, 0) + slot.missing_bytes
        left = available_bytes()
        if left is not None:
            left = (left - self._spare) // self._sharers
            left -= sum(missing.get(one.name, 0) for one in self.tiers if one.shared)
        rooms = []
        for tier in self.tiers:
            room = tier.room_bytes(taken.get(tier.name, 0), missing.get(tier.name, 0))
            if tier.shared and left is not None:
                room = min(room, max(0, left))
                left -= room - room % (self._size or 1)
            rooms.append(room)
        return rooms

    def _new(self) -> MemorySlot | None:
        """Return a new slot in the first tier with room for it; None without one."""
        for tier, room in zip(self.tiers, self._rooms(), strict=True):
            if room >= self._size and (memory := tier.new(self._size)) is not None:
                slot = MemorySlot(memory, tier.name, lazy=tier.lazy)
                return self._noted(slot)
        return None

    def allocated(self) -> list[Slot]:
        """Make all slots that there is room for, and return the free ones."""
        for _ in range(self.count - len(self.slots())):
            if (slot := self._new()) is None:
                break
            self._free.append(slot)
        return list(self._free)

    def take(self, *, pinned: bool, save: Save | None = None) -> Slot:
        """Return a free slot in the fastest memory, for `save`; its content is undefined.

        Raises StateError when there is no memory left for one more slot.
        """
        slot = self._fastest() or self._new()
        if slot is None:
            raise StateError(self.too_large())
        slot.busy, slot.save, slot.kept = True, save, None
        try:
            slot.hold(self._size, pinned=pinned)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def _fastest(self) -> MemorySlot | None:
        for slot in self.slots():
            with contextlib.suppress(ValueError):  # taken: deque.remove is atomic
                self._free.remove(slot)
                if len(slot.memory) >= self._size:
                    return slot
                slot.free()  # given back while the size grew
        return None

    def give(self, slot: Slot) -> None:
        assert isinstance(slot, MemorySlot)
        slot.busy = False
        if len(slot.memory) < self._size:
            slot.free()
        else:
            self._free.append(slot)

    def free(self) -> None:
        """Free the memory of the free slots."""
        while self._free:
            with contextlib.suppress(IndexError):
                self._free.pop().free()

    def use(self) -> tuple[TierUse, ...]:
        """Return the use of each tier now, fastest first."""
        return tuple(
            TierUse(
                tier=tier.name,
                size_bytes=tier.size_bytes,
                used_bytes=self._bytes(tier, lambda one: one.busy and one.kept is None),
                free_bytes=room
                - room % (self._size or tier.unit)
                + self._bytes(tier, lambda one: not one.busy),
            )
            for tier, room in zip(self.tiers, self._rooms(), strict=True)
        )

    def _bytes(self, tier: MemoryTier, which: Callable[[MemorySlot], bool]) -> int:
        return sum(len(one.memory) for one in self.slots() if one.tier == tier.name and which(one))
