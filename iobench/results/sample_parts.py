"""The parts of a Sample: what was seen of an operation besides its time and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BackgroundRestores",
    "Cold",
    "DeviceCounts",
    "Interference",
    "MemoryUse",
    "Series",
    "Stored",
    "Verified",
    "WorldFacts",
]


@dataclass(frozen=True, kw_only=True)
class Cold:
    """Part of the files that was still in the page cache when the clock of a restore started.

    `method`: `cachestat` or `mincore`, joined by `+` if both were used; `remote` for storage that
    is not read through the page cache.
    """

    resident_bytes: int
    resident_fraction: float
    method: str
    dropped_caches: bool


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    """Increase of the counters while the clock ran; None for a counter that does not exist.

    `read_bytes`, `write_bytes`: the block device's (/sys/block/*/stat), I/O of all processes.
    `process_*`: `read_bytes` and `write_bytes` of /proc/self/io.
    """

    read_bytes: int | None
    write_bytes: int | None
    process_read_bytes: int | None
    process_write_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Interference of other processes while the clock ran; None for an unknown value.

    `steal_s`: CPU seconds that the hypervisor gave to others, summed over all CPUs (/proc/stat).
    `memory_stall_s`: time in which some task waited for memory (/proc/pressure/memory).
    `foreign_*_bytes`: the block device's count minus that of this process; small values are the
    file system's journal and metadata.
    """

    steal_s: float | None
    memory_stall_s: float | None
    foreign_read_bytes: int | None
    foreign_write_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Bytes in each `interval_s` from the start of the clock to its end; the last one is shorter.

    `completed`: bytes of completed operations by the writer's own count, padding included. Bytes
    written through the page cache are not on storage yet. None for writers without such a count.
    `counted`: bytes written (save) or read (restore) by `counter`: `device` is the block device
    with the I/O of all processes, `process` the calls of this process if there is no device.
    """

    interval_s: float
    completed: tuple[int, ...] | None
    counter: Literal["device", "process"] | None
    counted: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the files of a checkpoint looked like right after an operation, outside its clock.

    `problems`, in words: files that are missing, not regular (links count), of another size than
    was reported, with holes, on another file system or changed after the save, and mount points.
    `unsynced_bytes`: in the page cache, dirty or under write-back; None where the kernel cannot
    say, and `unseen` is the reason then. `flushed`: whether the device flushed
    its cache before the writer of a save returned; None where the kernel does not count that.
    `ignored_syncs`: why a sync makes nothing durable here; empty where it does.
    """

    problems: tuple[str, ...]
    unsynced_bytes: int | None
    unseen: str = ""
    flushed: bool | None = None
    ignored_syncs: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory that an operation took; None for a part that the kernel does not show.

    `process_bytes`: the most memory of the processes themselves, with what the writer keeps for
    its next operation, without the tensors. `page_cache_bytes`: pages of the checkpoint's files in
    the page cache right after the clock; 0 where no files are stored, None on a file system in
    memory and over several machines.
    """

    process_bytes: int | None
    page_cache_bytes: int | None

    @property
    def total_bytes(self) -> int | None:
        """The sum; None if a part is unknown: that of a buffered save is nearly all page cache."""
        if self.process_bytes is None or self.page_cache_bytes is None:
            return None
        return self.process_bytes + self.page_cache_bytes


@dataclass(frozen=True, kw_only=True)
class BackgroundRestores:
    """The restores that another process made, one after the other, while the clock ran.

    `writer` read them. `bytes` moved while the clock ran: a restore that it cut counts by the part
    of its time. `lead_s` is how long before the clock the first one began, and `lag_s` how long
    after it the last one ended; below zero, the clock ran without one. `reading_s` is the time of
    the clock in restores; between two of them the files leave the page cache. `resident_fraction`
    is the largest part of the files that stayed there. `from_storage` is the part of all their
    bytes that the kernel counted as read from storage by this process; None without such a counter.
    `mismatches` are the tensors of the last one that differ from what was saved. `error` is why it
    ended early; empty if it did not.
    """

    writer: str
    restores: int
    bytes: int
    lead_s: float
    lag_s: float
    reading_s: float
    resident_fraction: float
    from_storage: float | None
    mismatches: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Tensors and bytes that were compared with the saved ones, and the number of differences."""

    tensors: int
    bytes: int
    mismatches: int


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """The ranks that a launcher started, by rank where a field has several values.

    `interface` is the network interface of rank 0. `restored_from` is the rank whose files each
    rank restores. `clock_offset_s` was added to the monotonic clock of each rank to get that of
    rank 0, and is at most `clock_error_s` wrong.
    """

    launcher: str
    size: int
    nodes: int
    hosts: tuple[str, ...]
    node: tuple[int, ...]
    interface: str | None
    restored_from: tuple[int, ...]
    clock_offset_s: tuple[float, ...]
    clock_error_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("hosts", "node", "restored_from", "clock_offset_s", "clock_error_s"):
            found: Sequence[object] = getattr(self, name)
            if len(found) != self.size:
                raise ValueError(f"{name} must have {self.size} values, and has {len(found)}")

    def named(self, rank: int) -> str:
        """Return `rank 5 (host b)`."""
        return f"rank {rank} (host {self.hosts[rank]})"
