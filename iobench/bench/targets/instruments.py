"""Instruments: finds which kernel counters work in a directory, and checks files with them."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench import linux
from iobench.bench.counters.monitor import Monitor
from iobench.environment.mounts import mounts_in
from iobench.results.records import Stored
from iobench.units import KIB

__all__ = ["Instruments"]

_PROBE_BYTES = 256 * KIB  # more than a file system writes for the metadata of one file
_NO_CACHESTAT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


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
    mounts: frozenset[int] = frozenset()
    """The ids of the mounts in the directory; others are made later, by a writer."""

    @classmethod
    def probe(cls, directory: Path, monitor: Monitor) -> Instruments:
        """Write and sync a temporary file in `directory`, and read the counters. Raises OSError."""
        before = monitor.read()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(_PROBE_BYTES))
            file.flush()
            try:
                dirty = linux.cachestat_unsynced_bytes(file.fileno())
                os.fsync(file.fileno())
                left = linux.cachestat_unsynced_bytes(file.fileno())
            except OSError as error:
                if error.errno not in _NO_CACHESTAT:
                    raise
                os.fsync(file.fileno())
                unseen = f"no cachestat here ({error.strerror})"
            else:
                unseen = _unseen(dirty, left)
        after = monitor.read()
        grown = after - before if before and after else None
        return cls(
            unseen=unseen,
            device_counts=grown is not None and grown.write_bytes >= _PROBE_BYTES,
            flush_counts=grown is not None and grown.flushes > 0,
            mounts=frozenset(one.mount_id for one in mounts_in(os.path.realpath(directory))),
        )

    @property
    def _local(self) -> bool:
        """Whether times and device numbers of files are those of one local file system."""
        return self.device_counts and not self.unseen

    def inspect(
        self, directory: Path, files: Mapping[str, int], changed: dict[str, int] | None = None
    ) -> Stored:
        """Inspect every file below `directory`; `files` (path: bytes) must be among them.

        `changed` has the time of each file's last change, if it was inspected before; new files are
        added.
        """
        unsynced, sizes = 0, dict[str, int]()
        problems = list(self._mounted(os.path.realpath(directory)))
        for path in _entries(directory):
            name = str(path.relative_to(directory))
            try:
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    problems.append(f"{name} is {_kind(found.st_mode)}")
                    continue
                if self._local and found.st_dev != directory.stat().st_dev:
                    problems.append(f"{name} is on another file system")
                    continue
                with _opened(path) as fd:
                    unsynced += 0 if self.unseen else linux.cachestat_unsynced_bytes(fd)
                    if name in files and (hole := _first_hole(fd)) < found.st_size:
                        problems.append(f"{name} has a hole at byte {hole}")
            except FileNotFoundError:  # removed since the directory was listed
                continue
            since = {} if changed is None or not self._local else changed
            if since.setdefault(name, found.st_ctime_ns) != found.st_ctime_ns:
                problems.append(f"{name} was changed after its save")
            sizes[name] = found.st_size
        for name, size in files.items():
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] != size:
                problems.append(f"{name} has {sizes[name]} bytes, {size} were reported")
        return Stored(
            problems=tuple(problems),
            unsynced_bytes=None if self.unseen else unsynced,
            unseen=self.unseen,
        )

    def _mounted(self, top: str) -> Iterator[str]:
        for mount in mounts_in(top):
            if mount.mount_id not in self.mounts:
                yield f"{os.path.relpath(mount.mount_point, top)} is a mount point"


def _unseen(dirty: int, left: int) -> str:
    if dirty < _PROBE_BYTES:
        return "cachestat shows no dirty pages on this file system"
    return "pages stay dirty after a sync on this file system" if left else ""


def _entries(directory: Path) -> Iterator[Path]:
    """Yield everything below `directory` except directories; links are not followed."""
    for parent, directories, names in os.walk(directory):
        yield from (Path(parent, name) for name in names)
        # os.walk lists a link to a directory as a directory, and does not enter it.
        yield from (path for name in directories if (path := Path(parent, name)).is_symlink())


def _kind(mode: int) -> str:
    return "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _first_hole(fd: int) -> int:
    """Return where the file has no data: its first hole, or space that was only reserved.

    That is the end of the file where there is none, or where the file system shows none.
    """
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:
        return os.fstat(fd).st_size
