"""Instruments: finds which kernel counters work in a directory, and checks files with them."""

from __future__ import annotations

import os
import stat
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from iobench import linux
from iobench.bench.targets.cold import opened
from iobench.environment import DeviceMonitor
from iobench.environment.mounts import mounts_in
from iobench.environment.probes import BY_A_LIBRARY, PROBE_BYTES, try_sync
from iobench.results.records import DeviceCounts, Stored
from iobench.writers.removal import entries_below


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """The kernel's counters that work in a directory, found by writing one file there.

    Dirty pages show that a save was not synced. Not every file system shows them: on tmpfs every
    page is dirty; overlayfs, FUSE and DAX show none. A device's counter may stay at zero too. With
    native NVMe multipath, the devices below the mounted one count the I/O.
    """

    unseen: str = ""
    """Why dirty pages cannot be counted; empty where they can."""
    device_counts: bool = True
    """Whether the device's counter grows with the bytes that are written."""
    flush_counts: bool = False
    """Whether the device's counter of flushes grows with a sync."""
    ignored_syncs: str = ""
    """Why a sync makes nothing durable here; empty where it does."""
    mounts: frozenset[int] = frozenset()
    """The ids of the mounts in the directory; others are made later, by a writer."""

    @classmethod
    def probe(cls, directory: Path, monitor: DeviceMonitor) -> Instruments:
        """Write and sync a temporary file in `directory`, and read the counters. Raises OSError."""
        before = monitor.read()
        with tempfile.TemporaryFile(dir=directory) as file:
            unseen, ignored = try_sync(file.fileno(), directory)
            if unseen:
                ignored = _unflushed(file.fileno(), monitor)
        after = monitor.read()
        grown = after - before if before and after else None
        return cls(
            unseen=unseen,
            device_counts=grown is not None and grown.write_bytes >= PROBE_BYTES,
            flush_counts=grown is not None and grown.flushes > 0,
            ignored_syncs=ignored,
            mounts=frozenset(one.mount_id for one in mounts_in(os.path.realpath(directory))),
        )

    @property
    def _local(self) -> bool:
        """Whether times and device numbers of files are those of one local file system."""
        return self.device_counts and not self.unseen

    def seen(self, device: DeviceCounts) -> DeviceCounts:
        """Return the counters of an operation, without those of a device that does not count."""
        return device if self.device_counts else replace(device, read_bytes=None, write_bytes=None)

    def inspect(
        self, directory: Path, files: Iterable[tuple[str, int]], changes: Changes | None = None
    ) -> Stored:
        """Inspect every file below `directory`; `files` (path, bytes) must be among them.

        `changes` has the time of each file's last change, if it was inspected before; new files are
        added.
        """
        look = _Look(self, directory)
        look.problems += self._mounted(os.path.realpath(directory))
        changes = changes or Changes()
        known = changes.of_files
        ours: set[str] = set()
        for number, (name, size) in enumerate(files):
            ours.add(name)
            found = look.at(name, ours=True)
            if found is None:
                look.problems.append(f"{name} is missing")
            elif found.st_size != size:
                look.problems.append(f"{name} has {found.st_size} bytes, {size} were reported")
            if number == len(known):
                known.append(found.st_ctime_ns if found else 0)
            elif found:
                look.compare(name, found, known[number])
        for path in entries_below(directory):
            name = os.path.relpath(path, directory)
            found = None if name in ours else look.at(name, ours=False)
            if found:
                look.compare(name, found, changes.of_others.setdefault(name, found.st_ctime_ns))
        return Stored(
            problems=tuple(look.problems),
            unsynced_bytes=None if self.unseen else look.unsynced_bytes,
            unseen=self.unseen,
            ignored_syncs=self.ignored_syncs,
        )

    def _mounted(self, top: str) -> Iterator[str]:
        for mount in mounts_in(top):
            if mount.mount_id not in self.mounts:
                yield f"{os.path.relpath(mount.mount_point, top)} is a mount point"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The time of the last change of each file in ns: of the given files in order, and of others.

    There may be 100,000 files.
    """

    of_files: array[int] = field(default_factory=lambda: array("q"))
    of_others: dict[str, int] = field(default_factory=dict)


class _Look:
    def __init__(self, instruments: Instruments, directory: Path) -> None:
        self._instruments, self._directory = instruments, directory
        self.problems: list[str] = []
        self.unsynced_bytes = 0

    def at(self, name: str, *, ours: bool) -> os.stat_result | None:
        """Inspect one file, and return what lstat(2) says; None if there is no regular file here.

        Only files of `ours` have no holes.
        """
        path = os.path.join(self._directory, name)
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode):
                self.problems.append(f"{name} is {_kind(found.st_mode)}")
                return None
            if self._instruments._local and found.st_dev != self._directory.stat().st_dev:
                self.problems.append(f"{name} is on another file system")
                return None
            with opened(path, os.O_NOFOLLOW) as fd:
                if not self._instruments.unseen:
                    self.unsynced_bytes += linux.cachestat_unsynced_bytes(fd)
                if ours and (hole := _first_hole(fd)) < found.st_size:
                    self.problems.append(f"{name} has a hole at byte {hole}")
        except FileNotFoundError:
            return None
        return found

    def compare(self, name: str, found: os.stat_result, before_ns: int) -> None:
        """Note a change since `before_ns`, where the times are those of one local file system."""
        if self._instruments._local and found.st_ctime_ns != before_ns:
            self.problems.append(f"{name} was changed after its save")


def _unflushed(fd: int, monitor: DeviceMonitor) -> str:
    """Return a reason if only the system call makes the device flush; for want of dirty pages."""
    flushes = []
    for sync in (os.fsync, linux.kernel_fsync):
        before = monitor.read()
        os.pwrite(fd, os.urandom(PROBE_BYTES), 0)
        sync(fd)
        after = monitor.read()
        flushes.append(before is not None and after is not None and after.flushes > before.flushes)
    return BY_A_LIBRARY if flushes == [False, True] else ""


def _kind(mode: int) -> str:
    return "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"


def _first_hole(fd: int) -> int:
    """Return where the file has no data: its first hole, or space that was only reserved.

    That is the end of the file where there is none, or where the file system shows none.
    """
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:
        return os.fstat(fd).st_size
