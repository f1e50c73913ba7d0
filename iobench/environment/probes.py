"""Probes: try in one directory what the I/O paths need, on files of at most 1 MiB.

All files are in a new directory `.iobench-probe-*`, which is removed on return, on error and on
Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench.environment.device import DeviceMonitor
from iobench.environment.direct import try_direct
from iobench.environment.storage import check_directory
from iobench.linux import (
    RWF_DONTCACHE,
    cachestat_resident_bytes,
    fallocate,
    kernel_version,
    mincore_resident_bytes,
    resident_bytes,
    sync_file,
)
from iobench.units import KIB, MIB, format_seconds, format_size

_FSYNCS = 7
_WATCH_S = 0.5
_QUIET_BYTES_PER_S = MIB  # a journal or a log; more I/O lowers the figures


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

    If nothing can be written there, the result has only the probes `write` and `drop_caches`.
    Raises TargetError if `directory` is not a directory.
    """
    path = check_directory(directory)
    try:
        with scratch(path) as room:
            return [_run(name, attempt, room) for name, attempt in _ATTEMPTS.items()]
    except OSError as error:
        return [
            Probe(
                name="write",
                ok=False,
                detail=f"nothing can be written here: {say(error)}",
                remedy="Choose a writable directory with free space.",
            ),
            _run("drop_caches", _drop_caches, path),
        ]


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Make an empty directory inside `directory`, and remove it with its content at the end."""
    import shutil  # slow to import, and only `iobench doctor` needs them
    import tempfile

    room = Path(tempfile.mkdtemp(prefix=".iobench-probe-", dir=directory))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def say(error: OSError) -> str:
    """Return the error as `EOPNOTSUPP (Operation not supported)`."""
    number = error.errno or 0
    # ENOTSUP has the same number on Linux; EOPNOTSUPP is the name in manual pages.
    name = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, number)
    return f"{name} ({os.strerror(number)})"


def _run(name: str, attempt: Callable[[str, Path], Probe], room: Path) -> Probe:
    """Return the result of the attempt; an unexpected OSError is a failed probe."""
    try:
        return attempt(name, room)
    except OSError as error:
        return Probe(name=name, ok=False, detail=say(error))


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


def _direct(name: str, room: Path) -> Probe:
    ok, detail, remedy = try_direct(room / name)
    return Probe(name=name, ok=ok, detail=detail, remedy=remedy)


def _dontcache(name: str, room: Path) -> Probe:
    remedy = "The writer `uncached` falls back to sync_file_range and POSIX_FADV_DONTNEED."
    with _file(room, name) as descriptor:
        try:
            os.pwritev(descriptor, [os.urandom(256 * KIB)], 0, RWF_DONTCACHE)
        except OSError as error:
            why = say(error)
            if kernel_version() < (6, 14):
                why += ": needs Linux 6.14"
            elif error.errno == errno.EOPNOTSUPP:
                why += ": this file system does not implement it"
            return Probe(name=name, ok=False, detail=why, remedy=remedy, needed=False)
        os.fsync(descriptor)
        left, _ = resident_bytes(descriptor)
        detail = "pwritev2 takes it; "
        detail += f"{format_size(left)} stay cached after fsync" if left else "nothing stays cached"
        return Probe(name=name, ok=True, detail=detail, needed=False)


def _fallocate(name: str, room: Path) -> Probe:
    with _file(room, name) as descriptor:
        try:
            fallocate(descriptor, 0, MIB)
        except OSError as error:
            remedy = "Files grow as they are written; on ext4 that is slower and less steady."
            return Probe(name=name, ok=False, detail=say(error), remedy=remedy, needed=False)
        status = os.fstat(descriptor)
        held = status.st_blocks * 512
        detail = f"1 MiB asked, size {format_size(status.st_size)}, {format_size(held)} on disk"
        ok = status.st_size == MIB and held >= MIB
        remedy = (
            "" if ok else "Space is not reserved in advance here: the disk may fill in mid-run."
        )
        return Probe(name=name, ok=ok, detail=detail, remedy=remedy, needed=False)


def _cachestat(name: str, room: Path) -> Probe:
    with _file(room, name, 256 * KIB) as descriptor:
        try:
            seen = cachestat_resident_bytes(descriptor)
        except OSError as error:
            why = say(error) + (": needs Linux 6.5" if kernel_version() < (6, 5) else "")
            remedy = "Cold reads are proved with mincore(2) instead."
            return Probe(name=name, ok=False, detail=why, remedy=remedy, needed=False)
    return _seen(name, seen)


def _mincore(name: str, room: Path) -> Probe:
    with _file(room, name, 256 * KIB) as descriptor:
        return _seen(name, mincore_resident_bytes(descriptor))


def _seen(name: str, seen_bytes: int) -> Probe:
    """Check a counter: it must see the 256 KiB that were just written through the page cache."""
    return Probe(
        name=name,
        ok=seen_bytes >= 256 * KIB,
        detail=f"sees {format_size(seen_bytes)} cached of 256 KiB just written",
        remedy=""
        if seen_bytes
        else "This file system caches elsewhere: cold reads cannot be proved here.",
        needed=False,
    )


def _eviction(name: str, room: Path) -> Probe:
    with _file(room, name, MIB) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left, how = resident_bytes(descriptor)
    return Probe(
        name=name,
        ok=left == 0,
        detail=f"{format_size(left)} of 1.00 MiB stay cached after POSIX_FADV_DONTNEED ({how})",
        remedy=""
        if left == 0
        else "Restores are warm here and INVALID; drop_caches (root) may help, except on tmpfs.",
    )


def _drop_caches(name: str, _room: Path) -> Probe:
    try:
        os.close(os.open("/proc/sys/vm/drop_caches", os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:
        remedy = "Not needed if eviction works; it needs root."
        return Probe(name=name, ok=False, detail=say(error), remedy=remedy, needed=False)
    return Probe(name=name, ok=True, detail="permitted (opened, not used)", needed=False)


def _fsync(name: str, room: Path) -> Probe:
    with _file(room, name, 4 * KIB) as descriptor:
        times = []
        for _ in range(_FSYNCS):
            _write(descriptor, os.urandom(4 * KIB))
            start = time.perf_counter()
            os.fsync(descriptor)
            times.append(time.perf_counter() - start)
    median, worst = sorted(times)[_FSYNCS // 2], max(times)
    return Probe(
        name=name,
        ok=True,
        detail=f"median {format_seconds(median)}, worst {format_seconds(worst)} "
        f"({_FSYNCS} times, 4 KiB each)",
    )


def _directory_fsync(name: str, room: Path) -> Probe:
    try:
        sync_file(room, os.O_DIRECTORY)
    except OSError as error:
        remedy = "An fsync cannot make the rename of a commit durable here."
        return Probe(name=name, ok=False, detail=say(error), remedy=remedy)
    return Probe(name=name, ok=True, detail="accepted")


def _rename(name: str, room: Path) -> Probe:
    """Rename a file over a file, and a directory to a new name, like a commit."""
    with _file(room, "old", 4 * KIB), _file(room, "new", 4 * KIB) as descriptor:
        (room / "new").replace(room / "old")
        replaced = (room / "old").stat().st_ino == os.fstat(descriptor).st_ino
    (room / "aside").mkdir()
    (room / "aside").rename(room / "published")
    ok = replaced and (room / "published").is_dir() and not (room / "new").exists()
    detail = "replaces a file, moves a directory" if ok else "the old file is still there"
    return Probe(name=name, ok=ok, detail=detail)


def _tmpfile(name: str, room: Path) -> Probe:
    try:
        os.close(os.open(room, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return Probe(name=name, ok=False, detail=say(error), needed=False)
    return Probe(name=name, ok=True, detail="files without a name", needed=False)


def _other_io(name: str, room: Path) -> Probe:
    """Measure the I/O of other processes on the device for half a second."""
    monitor = DeviceMonitor(room)
    before, began = monitor.read(), time.perf_counter()
    time.sleep(_WATCH_S)
    after, elapsed_s = monitor.read(), time.perf_counter() - began
    if before is None or after is None:
        detail = "no block device of this machine: not checked"
        return Probe(name=name, ok=True, detail=detail, needed=False)
    read = (after.read_bytes - before.read_bytes) / elapsed_s
    written = (after.write_bytes - before.write_bytes) / elapsed_s
    quiet = read + written <= _QUIET_BYTES_PER_S
    return Probe(
        name=name,
        ok=quiet,
        detail=f"others read {format_size(read)}/s, write {format_size(written)}/s on the device",
        remedy="" if quiet else "Find the process (iotop -o); it lowers figures taken now.",
        needed=False,
    )


_ATTEMPTS: dict[str, Callable[[str, Path], Probe]] = {
    "other I/O": _other_io,
    "O_DIRECT": _direct,
    "RWF_DONTCACHE": _dontcache,
    "fallocate": _fallocate,
    "cachestat": _cachestat,
    "mincore": _mincore,
    "eviction": _eviction,
    "drop_caches": _drop_caches,
    "fsync": _fsync,
    "directory fsync": _directory_fsync,
    "rename": _rename,
    "O_TMPFILE": _tmpfile,
}
