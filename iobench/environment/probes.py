"""Probes: try in one directory what the I/O paths need, on files of at most 1 MiB.

All files are in a new directory `.iobench-probe-*`, which is removed on return, on error and on
Ctrl-C.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from iobench import linux
from iobench.environment.blockdev import DeviceMonitor
from iobench.environment.mounts import mount_of
from iobench.environment.storage import check_directory
from iobench.linux import (
    RWF_DONTCACHE,
    dio_alignment,
    fallocate,
    kernel_version,
    resident_bytes,
    sync_file,
)
from iobench.units import KIB, MIB, format_seconds, format_size

BY_A_LIBRARY = "fsync of the C library does nothing: a preloaded library replaces it"
PROBE_BYTES = 256 * KIB  # more than a file system writes for the metadata of one file
_NO_CACHESTAT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
# Their pages are clean after a sync that was carried out.
_CLEAN_AFTER_SYNC = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}
_FSYNCS = 7
_WATCH_S = 0.5
_QUIET_BYTES_PER_S = MIB  # a journal or a log; more I/O lowers the figures
_BLOCK = 64 * KIB
_NO_DIRECT = "The writer odirect is not available here; buffered and uncached are."
_NEEDED = {"O_DIRECT", "eviction", "fsync", "directory fsync", "rename"}

_Found: TypeAlias = tuple[bool, str, str]
"""What an attempt found: whether it works, the details, and the remedy."""

_Attempt: TypeAlias = Callable[[Path], _Found]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The result of one try. `needed` is False if iobench has an alternative."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


def probe_directory(directory: Path | str) -> list[Probe]:
    """Try everything that the I/O paths need in `directory`; takes about half a second.

    If nothing can be written there, the result has only the probe `write`.
    Raises TargetError if `directory` is not a directory.
    """
    from tempfile import TemporaryDirectory  # slow to import, and only `iobench doctor` needs it

    path = check_directory(directory)
    try:
        with TemporaryDirectory(
            prefix=".iobench-probe-", dir=path, ignore_cleanup_errors=True
        ) as room:
            return [_run(name, attempt, Path(room)) for name, attempt in _ATTEMPTS.items()]
    except OSError as error:
        return [
            Probe(
                name="write",
                ok=False,
                detail=f"nothing can be written here: {say(error)}",
                remedy="Choose a writable directory with free space.",
            )
        ]


def say(error: OSError) -> str:
    """Return the error as `EOPNOTSUPP (Operation not supported)`."""
    number = error.errno or 0
    # ENOTSUP has the same number on Linux; EOPNOTSUPP is the name in manual pages.
    name = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, number)
    return f"{name} ({os.strerror(number)})"


def _run(name: str, attempt: _Attempt, room: Path) -> Probe:
    """Return the result of the attempt; an unexpected OSError is a failed probe."""
    needed = name in _NEEDED
    try:
        ok, detail, remedy = attempt(room)
    except OSError as error:
        ok, detail, remedy, needed = False, say(error), "", True
    return Probe(name=name, ok=ok, detail=detail, remedy=remedy, needed=needed)


@contextmanager
def _file(room: Path, name: str, size_bytes: int = 0) -> Iterator[int]:
    """Make a file of random bytes through the page cache, sync it, and yield its descriptor."""
    descriptor = os.open(room / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if size_bytes:
            _write(descriptor, os.urandom(size_bytes))
            os.fsync(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    written = os.pwrite(descriptor, data, 0)
    if written != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _direct(room: Path) -> _Found:
    """Try O_DIRECT: is it accepted, at which alignment, and does it avoid the cache?

    A file system may accept O_DIRECT and still use the page cache (tmpfs; ext4 with data=journal),
    so the pages that are cached afterwards are counted. Raises OSError only for errors unrelated to
    O_DIRECT, such as a full disk.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
    try:
        descriptor = os.open(room / "direct", flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False, f"open refused: {errno.errorcode[error.errno]}", _NO_DIRECT
    memory = mmap.mmap(-1, 2 * _BLOCK)
    try:
        return _try_direct(descriptor, memory)
    finally:
        os.close(descriptor)
        memory.close()


def _try_direct(descriptor: int, memory: mmap.mmap) -> _Found:
    reported = dio_alignment(descriptor)
    if reported is not None and not reported.offset:
        return False, "statx: this file admits no direct I/O", _NO_DIRECT
    memory[:_BLOCK] = data = os.urandom(_BLOCK)
    with memoryview(memory) as whole, whole[:_BLOCK] as written, whole[_BLOCK:] as back:
        try:
            os.pwritev(descriptor, [written], 0)
            os.preadv(descriptor, [back], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False, "open accepted, an aligned write or read refused", _NO_DIRECT
    if memory[_BLOCK:] != data:
        return False, "what was read is not what was written", _NO_DIRECT
    cached, _ = resident_bytes(descriptor)
    if cached:
        kept = (
            f"accepted, yet {format_size(cached)} of {format_size(_BLOCK)} went to the page cache"
        )
        return False, kept, "O_DIRECT has no effect here; use buffered or uncached."
    what = "statx reports no alignment"
    if reported is not None:
        what = f"memory aligned to {reported.memory} B, offsets to {reported.offset} B"
    return True, f"works; {what}", ""


def _dontcache(room: Path) -> _Found:
    with _file(room, "dontcache") as descriptor:
        try:
            os.pwritev(descriptor, [os.urandom(256 * KIB)], 0, RWF_DONTCACHE)
        except OSError as error:
            why = say(error)
            if kernel_version() < (6, 14):
                why += ": needs Linux 6.14"
            elif error.errno == errno.EOPNOTSUPP:
                why += ": this file system does not implement it"
            remedy = "The writer `uncached` falls back to sync_file_range and POSIX_FADV_DONTNEED."
            return False, why, remedy
        os.fsync(descriptor)
        left, _ = resident_bytes(descriptor)
    stays = f"{format_size(left)} stay cached after fsync" if left else "nothing stays cached"
    return True, f"pwritev2 takes it; {stays}", ""


def _fallocate(room: Path) -> _Found:
    with _file(room, "fallocate") as descriptor:
        try:
            fallocate(descriptor, 0, MIB)
        except OSError as error:
            remedy = "Files grow as they are written; on ext4 that is slower and less steady."
            return False, say(error), remedy
        status = os.fstat(descriptor)
    held = status.st_blocks * 512
    detail = f"1 MiB asked, size {format_size(status.st_size)}, {format_size(held)} on disk"
    if status.st_size == MIB and held >= MIB:
        return True, detail, ""
    return False, detail, "Space is not reserved in advance here: the disk may fill in mid-run."


def _page_cache(room: Path) -> _Found:
    """Count the pages that were just written through the page cache, as a run does."""
    with _file(room, "cached", 256 * KIB) as descriptor:
        seen, how = resident_bytes(descriptor)
    elsewhere = "This file system caches elsewhere: cold reads cannot be proved here."
    detail = f"{how} sees {format_size(seen)} cached of 256 KiB just written"
    return seen >= 256 * KIB, detail, "" if seen else elsewhere


def _eviction(room: Path) -> _Found:
    with _file(room, "eviction", MIB) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left, how = resident_bytes(descriptor)
    detail = f"{format_size(left)} of 1.00 MiB stay cached after POSIX_FADV_DONTNEED ({how})"
    warm = "Restores are warm here and INVALID; drop_caches (root) may help, except on tmpfs."
    return left == 0, detail, warm if left else ""


def _fsync(room: Path) -> _Found:
    with _file(room, "fsync", 4 * KIB) as descriptor:
        times = []
        for _ in range(_FSYNCS):
            _write(descriptor, os.urandom(4 * KIB))
            start = time.perf_counter()
            os.fsync(descriptor)
            times.append(time.perf_counter() - start)
        _, ignored = try_sync(descriptor, room)
    median, worst = format_seconds(sorted(times)[_FSYNCS // 2]), format_seconds(max(times))
    if ignored:
        remedy = "Nothing is durable here. Look at LD_PRELOAD, and for a filter of the container."
        return False, f"{median}: nothing is synced here ({ignored})", remedy
    return True, f"median {median}, worst {worst} ({_FSYNCS} times, 4 KiB each)", ""


def try_sync(fd: int, directory: Path) -> tuple[str, str]:
    """Write PROBE_BYTES to the open file `fd` in `directory`, and sync them.

    Returns (why nothing can be seen here, why syncs are ignored here); empty texts where that is
    not so. The file is synced by `os.fsync`, as writers do it, and then by the system call. So a
    preloaded library is seen by the difference. Raises OSError.
    """
    os.pwrite(fd, os.urandom(PROBE_BYTES), 0)
    try:
        dirty = linux.cachestat_unsynced_bytes(fd)
        os.fsync(fd)
        kept = linux.cachestat_unsynced_bytes(fd)
        linux.kernel_fsync(fd)
        left = linux.cachestat_unsynced_bytes(fd)
    except OSError as error:
        if error.errno not in _NO_CACHESTAT:
            raise
        linux.kernel_fsync(fd)
        return f"no cachestat here ({error.strerror})", ""
    if dirty < PROBE_BYTES:
        return "cachestat shows no dirty pages on this file system", ""
    if not left:
        return "", BY_A_LIBRARY if kept else ""
    mount = mount_of(directory)
    if mount is not None and mount.fs_type in _CLEAN_AFTER_SYNC:
        return "", f"pages of {mount.fs_type} stay dirty after fsync(2)"
    return "pages stay dirty after a sync on this file system", ""


def _directory_fsync(room: Path) -> _Found:
    try:
        sync_file(room, os.O_DIRECTORY)
    except OSError as error:
        return False, say(error), "An fsync cannot make the rename of a commit durable here."
    return True, "accepted", ""


def _rename(room: Path) -> _Found:
    """Rename a file over a file, and a directory to a new name, like a commit."""
    with _file(room, "old", 4 * KIB), _file(room, "new", 4 * KIB) as descriptor:
        (room / "new").replace(room / "old")
        replaced = (room / "old").stat().st_ino == os.fstat(descriptor).st_ino
    (room / "aside").mkdir()
    (room / "aside").rename(room / "published")
    if replaced and (room / "published").is_dir() and not (room / "new").exists():
        return True, "replaces a file, moves a directory", ""
    return False, "the old file is still there", ""


def _other_io(room: Path) -> _Found:
    """Measure the I/O of other processes on the device for half a second."""
    monitor = DeviceMonitor(room)
    before, began = monitor.read(), time.perf_counter()
    time.sleep(_WATCH_S)
    after, elapsed_s = monitor.read(), time.perf_counter() - began
    if before is None or after is None:
        return True, "no block device of this machine: not checked", ""
    read = (after.read_bytes - before.read_bytes) / elapsed_s
    written = (after.write_bytes - before.write_bytes) / elapsed_s
    detail = f"others read {format_size(read)}/s, write {format_size(written)}/s on the device"
    if read + written <= _QUIET_BYTES_PER_S:
        return True, detail, ""
    return False, detail, "Find the process (iotop -o); it lowers figures taken now."


_ATTEMPTS: dict[str, _Attempt] = {
    "other I/O": _other_io,
    "O_DIRECT": _direct,
    "RWF_DONTCACHE": _dontcache,
    "fallocate": _fallocate,
    "page cache": _page_cache,
    "eviction": _eviction,
    "fsync": _fsync,
    "directory fsync": _directory_fsync,
    "rename": _rename,
}
