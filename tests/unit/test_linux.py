"""The Linux calls that Python does not wrap, on the real kernel."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench import linux
from iobench.regular_file import open_regular, read_regular


def test_fallocate_reserves_and_extends(fd: int) -> None:
    """The file has the size and the blocks, and reads as zeros."""
    try:
        linux.fallocate(fd, 0, 100_000)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("the file system of the temporary directory has no fallocate")
    found = os.fstat(fd)
    assert found.st_size == 100_000
    assert found.st_blocks * 512 >= 100_000
    assert os.pread(fd, 100_000, 0) == bytes(100_000)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda: linux.fallocate(-1, 0, 1), errno.EBADF),
        (lambda: linux.sync_file_range(-1, 0, 1, 0), errno.EBADF),
        (lambda: linux.cachestat_resident_bytes(-1), errno.EBADF),
        (lambda: linux.dio_alignment(-1), errno.EBADF),
    ],
)
def test_errors_carry_the_errno(call, number: int) -> None:
    """A call that the kernel refuses raises OSError with the kernel's number."""
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        call()
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fallocate", lambda fd: linux.fallocate(fd, 0, 4096)),
        ("statfs", lambda fd: linux.file_system_type(f"/proc/self/fd/{fd}")),
    ],
)
def test_a_signal_ends_no_call(
    fd: int, name: str, call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that a signal interrupted is repeated; another error is raised."""
    errors = [errno.EINTR, errno.EINTR, errno.ENOSPC]

    def interrupted(*_: object) -> int:
        ctypes.set_errno(errors.pop(0))
        return -1

    monkeypatch.setattr(linux._libc, name, interrupted)
    with pytest.raises(OSError, match="No space left"):
        call(fd)
    assert not errors


def test_what_the_handler_of_a_signal_raises(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is KeyboardInterrupt, and the interrupted call is not repeated."""
    calls: list[int] = []

    def interrupted(*_: object) -> int:
        calls.append(1)
        ctypes.set_errno(errno.EINTR)
        _thread.interrupt_main()
        return -1

    monkeypatch.setattr(linux._libc, "fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        linux.fallocate(fd, 0, 4096)
    assert len(calls) == 1


def test_sync_file_range_changes_no_bytes(fd: int) -> None:
    """Starting and awaiting write-back leaves the content unchanged."""
    os.write(fd, b"x" * 10_000)
    flags = linux.SYNC_FILE_RANGE_WRITE | linux.SYNC_FILE_RANGE_WAIT_AFTER
    linux.sync_file_range(fd, 0, 10_000, flags)
    assert os.pread(fd, 10_000, 0) == b"x" * 10_000


def test_resident_bytes_are_whole_pages(fd: int) -> None:
    """Bytes that were just written are in the page cache, counted in pages; mincore and cachestat
    return the same. An empty file has 0 pages, and no mapping of length zero."""
    assert linux.mincore_resident_bytes(fd) == linux.resident_bytes(fd)[0] == 0
    os.write(fd, b"x" * (2 * linux.PAGE + 1))
    resident, how = linux.resident_bytes(fd)
    assert resident == linux.mincore_resident_bytes(fd) == 3 * linux.PAGE
    assert how in ("cachestat", "mincore")


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO, "overlayfs"]
)
def test_mincore_where_cachestat_is_missing(
    fd: int, number: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel or a sandbox lacks cachestat, and on overlayfs, where it always counts 0 pages,
    mincore is used, and the method says so. Other errors are raised."""

    def refuse(_: int) -> int:
        if isinstance(number, str):
            return 0
        raise OSError(number, os.strerror(number))

    if number == "overlayfs":
        monkeypatch.setattr(linux, "file_system_type", lambda _path: 0x794C7630)
    monkeypatch.setattr(linux, "cachestat_resident_bytes", refuse)
    os.write(fd, b"x")
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            linux.resident_bytes(fd)
    else:
        assert linux.resident_bytes(fd) == (linux.PAGE, "mincore")


def test_dio_alignment_is_a_power_of_two_or_unknown(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of statx are powers of two, or zeros without direct I/O. If the number of the
    system call is unknown, the alignment is unknown."""
    if (found := linux.dio_alignment(fd)) is not None:
        assert all(value & (value - 1) == 0 for value in (found.memory, found.offset))
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert linux.dio_alignment(fd) is None


def test_kernel_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Major and minor are parsed from the release names of all distributions."""
    releases = {"6.14.0-rc3+": (6, 14), "5.10.0-8-amd64": (5, 10), "6.1-foo": (6, 1), "7.0": (7, 0)}
    try:
        for release, version in releases.items():
            monkeypatch.setattr(platform, "release", lambda release=release: release)
            linux.kernel_version.cache_clear()
            assert linux.kernel_version() == version
    finally:
        linux.kernel_version.cache_clear()


def priorities_in_a_thread(start: int, asked: int) -> list[tuple[int, int]]:
    """Nice value and I/O priority of a thread at nice `start` before and after it yields."""
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    if number is None:
        pytest.skip("the number of ioprio_get is not known")
    found: list[tuple[int, int]] = []
    failures: list[OSError] = []

    def priorities() -> tuple[int, int]:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return nice, linux._libc.syscall(ctypes.c_long(number), 1, 0)

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), start)
            found.append(priorities())
            linux.yield_to_others(asked)
            found.append(priorities())
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    return found


_BEST_EFFORT_7 = 2 << 13 | 7


@pytest.mark.parametrize("least", [0, 15])
def test_priority_is_lowered_and_never_raised(least: int) -> None:
    """To the requested value, unless that of the thread is lower; I/O to the lowest best-effort
    level."""
    own = max(least, os.getpriority(os.PRIO_PROCESS, 0))
    before, after = priorities_in_a_thread(own, 10)
    assert before[0] == own
    assert after == (max(own, 10), _BEST_EFFORT_7)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND])
def test_only_regular_files_are_opened(tmp_path: Path, flags: int) -> None:
    """A pipe without another end, a socket, a device and a directory: an error at once."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(tmp_path):
        bound.bind("socket")
        for name, kind in (("pipe", "a pipe"), ("socket", "a socket"), ("/dev/null", "a device")):
            with pytest.raises(OSError, match=f"{kind}, not a regular file") as raised:
                open_regular(tmp_path / name, flags)
            assert raised.value.errno == errno.ENXIO
            assert raised.value.filename == str(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path, flags)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none", flags)


def test_a_regular_file_is_opened_as_open_does(tmp_path: Path) -> None:
    """Its flags are those that were asked for, without O_NONBLOCK."""
    path = tmp_path / "file"
    path.write_bytes(b"data")
    fd = open_regular(path, os.O_RDWR | os.O_APPEND)
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        assert flags & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK) == os.O_RDWR | os.O_APPEND
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    assert read_regular(path) == b"data"


def test_a_leased_file_is_waited_for(tmp_path: Path) -> None:
    """An open breaks the lease of another process; without a wait it would fail (EAGAIN)."""
    path = tmp_path / "file"
    path.write_bytes(b"data")
    code = (
        "import fcntl, os, signal, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print(flush=True)\n"
        "signal.sigwait([signal.SIGIO])\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("this file system has no leases")
        assert read_regular(path) == b"data"
    assert holder.returncode == 0
