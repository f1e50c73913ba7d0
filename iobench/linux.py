"""The Linux calls that Python does not wrap: statx, cachestat, fallocate, ioprio_set and others.

Each function raises OSError with the kernel's errno. Numbers are from the kernel's uapi headers.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RWF_DONTCACHE = 0x80  # linux/fs.h, since 6.14
SYNC_FILE_RANGE_WAIT_BEFORE, SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_WAIT_AFTER = 1, 2, 4
PAGE = mmap.PAGESIZE

_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_AT_EMPTY_PATH = 0x1000
_SYS_STATX = {"x86_64": 332, "aarch64": 291}
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_BE, _IOPRIO_CLASS_SHIFT = 1, 2, 13  # linux/ioprio.h
_LOWEST = 7
_SYS_CACHESTAT = 451  # since 6.5, the same number everywhere
_OVERLAYFS_MAGIC = 0x794C7630  # linux/magic.h
_FALLOC_DEFAULT = 0
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_MAP_FIXED = 0x10
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h

_libc = ctypes.CDLL(None, use_errno=True)
_off, _size = ctypes.c_int64, ctypes.c_size_t
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _off, _off]
_libc.sync_file_range.argtypes = [ctypes.c_int, _off, _off, ctypes.c_uint]
_libc.mincore.argtypes = [ctypes.c_void_p, _size, ctypes.c_void_p]
_libc.mmap.argtypes = [ctypes.c_void_p, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, _off]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, _size]
_libc.madvise.argtypes = [ctypes.c_void_p, _size, ctypes.c_int]


class _Statx(ctypes.Structure):
    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("_until_dio", ctypes.c_uint8 * 148),
        ("stx_dio_mem_align", ctypes.c_uint32),
        ("stx_dio_offset_align", ctypes.c_uint32),
        ("_rest", ctypes.c_uint8 * 96),
    )


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted")
    )


@dataclass(frozen=True, kw_only=True)
class DioAlignment:
    """What O_DIRECT asks of one file, in bytes: of memory addresses, and of offsets and lengths."""

    memory: int
    offset: int


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _repeated(call: Callable[[], int]) -> None:
    """Check a call that a signal may end early (EINTR), and make it again then, as Python does.

    Of those here that is fallocate and statfs; the signal's handler has run meanwhile, and what it
    raises is raised.
    """
    while True:
        try:
            _check(call())
            return
        except InterruptedError:
            pass


@functools.cache
def kernel_version() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def dio_alignment(fd: int) -> DioAlignment | None:
    """What O_DIRECT asks of the open file `fd`; None when the kernel or file system does not say.

    Zeros, the kernel's way to say that the file admits no direct I/O, are given as they are.
    """
    number = _SYS_STATX.get(platform.machine())
    if number is None:
        return None
    buffer = _Statx()
    _check(
        _libc.syscall(
            ctypes.c_long(number), fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(buffer)
        )
    )
    if not buffer.stx_mask & _STATX_DIOALIGN:
        return None
    return DioAlignment(memory=buffer.stx_dio_mem_align, offset=buffer.stx_dio_offset_align)


def _cachestat(fd: int, offset: int = 0, length: int = 0) -> _Cachestat:
    asked, result = _CachestatRange(offset, length), _Cachestat()
    _check(
        _libc.syscall(
            ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(asked), ctypes.byref(result), 0
        )
    )
    return result


def cachestat_resident_bytes(fd: int, offset: int = 0, length: int = 0) -> int:
    """Bytes of the open file `fd` that are in the page cache, by cachestat(2) (Linux >= 6.5).

    Whole pages of the range are counted; `length` 0 means to the end of the file.
    """
    return int(_cachestat(fd, offset, length).nr_cache) * PAGE


def cachestat_unsynced_bytes(fd: int) -> int:
    """Bytes of the open file `fd` that are dirty or under write-back, by cachestat(2).

    Whole pages are counted. A sync that succeeded leaves none.
    """
    found = _cachestat(fd)
    return int(found.nr_dirty + found.nr_writeback) * PAGE


def mincore_resident_bytes(fd: int) -> int:
    """The same by mapping the file and asking mincore(2); needs write permission or ownership."""
    length = os.fstat(fd).st_size
    if not length:
        return 0
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        _check(-1)
    try:
        pages = (ctypes.c_ubyte * -(-length // PAGE))()
        _check(_libc.mincore(address, length, pages))
        return sum(page & 1 for page in bytes(pages)) * PAGE
    finally:
        _libc.munmap(address, length)


def resident_bytes(fd: int) -> tuple[int, str]:
    """(bytes of the file in the page cache, how that was found: "cachestat" or "mincore")."""
    # The pages of a file on overlayfs belong to the file beneath, which cachestat does not look at:
    # it counts none. mmap does reach that file.
    if file_system_type(f"/proc/self/fd/{fd}") != _OVERLAYFS_MAGIC:
        try:
            return cachestat_resident_bytes(fd), "cachestat"
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
    return mincore_resident_bytes(fd), "mincore"


def fallocate(fd: int, offset: int, length: int) -> None:
    """Reserve blocks by fallocate(2). Unlike posix_fallocate it never writes zeros instead."""
    _repeated(lambda: _libc.fallocate(fd, _FALLOC_DEFAULT, offset, length))


def sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    """Start or await write-back of a byte range; makes nothing durable (no metadata, no flush)."""
    _check(_libc.sync_file_range(fd, offset, length, flags))


def give_up_pages(address: int, length: int) -> None:
    """Free the pages that lie wholly in private memory; they are zeros when touched again.

    A page that is locked in memory stays as it is.
    """
    start = address + -address % PAGE
    length = (address + length) // PAGE * PAGE - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_DONTNEED)


class RepeatedMapping:
    """A memory file of `size_bytes` mapped again and again, one after the other, to `total_bytes`.

    `numpy.asarray(ring)` is one array over all of it; the mapping goes when the last array does.
    Sizes are multiples of the page size.
    """

    def __init__(self, size_bytes: int, total_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._address = self._total = 0
        fd = os.memfd_create("iobench-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            address = self._map(None, total_bytes, 0, flags, -1)
            self._address, self._total = address, total_bytes
            for start in range(0, total_bytes, size_bytes):
                length = min(size_bytes, total_bytes - start)
                self._map(address + start, length, 3, mmap.MAP_SHARED | _MAP_FIXED, fd)
        finally:
            os.close(fd)
        self.__array_interface__ = {
            "shape": (total_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def forget(self, start: int) -> None:
        """Give up the mapping of pages from `start` on, not their content; a touch maps them again.

        So a long window counts in this process's resident memory only as far as it is in use.
        """
        length = self._total - start
        if length > 0:
            _check(_libc.madvise(self._address + start, length, mmap.MADV_DONTNEED))

    @staticmethod
    def _map(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
        mapped = _libc.mmap(address, length, protection, flags, fd, 0)
        if mapped == ctypes.c_void_p(-1).value:
            _check(-1)
        return int(mapped)

    def __del__(self) -> None:
        if self._address:
            _libc.munmap(self._address, self._total)


def file_system_type(path: str | Path) -> int:
    """The magic number of the file system that `path` is on, as in linux/magic.h (statfs)."""
    buffer = (ctypes.c_long * 32)()  # f_type is the first of its fields
    name = os.fsencode(path)
    _repeated(lambda: _libc.statfs(name, buffer))
    return buffer[0]


def sync_file_system(fd: int) -> None:
    """Make everything on the file system of the open file or directory `fd` durable (syncfs)."""
    _check(_libc.syncfs(fd))


def exchange_names(one: str, other: str) -> None:
    """Let two files or directories of one file system change names at once (renameat2).

    EINVAL or ENOSYS where the file system or the C library cannot.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = (os.fsencode(one), os.fsencode(other))
    _check(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE))


def yield_to_others(nice: int) -> None:
    """Lower the calling thread's CPU priority to `nice` and its I/O priority to the lowest.

    A thread at a lower CPU priority already keeps it. Best effort 7: late, and never starved, as
    the idle class can be (ioprio_set(2)). Threads that it starts inherit both. It cannot be taken
    back without privilege.
    """
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, max(nice, os.getpriority(os.PRIO_PROCESS, own)))
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if number is not None:
        priority = _IOPRIO_CLASS_BE << _IOPRIO_CLASS_SHIFT | _LOWEST
        _check(_libc.syscall(ctypes.c_long(number), _IOPRIO_WHO_PROCESS, 0, priority))


def populate(address: int, length: int) -> None:
    """Give pages to [address, address + length) now, not at the first touch (Linux >= 5.14)."""
    _check(_libc.madvise(address, length, _MADV_POPULATE_WRITE))


def has_page(address: int) -> bool:
    """Whether the byte of memory at `address` has a page already, by mincore(2)."""
    page = ctypes.c_ubyte()
    _check(_libc.mincore(address - address % PAGE, 1, ctypes.byref(page)))
    return bool(page.value & 1)


def advise_huge(address: int, length: int, *, huge: bool) -> None:
    """Ask for huge pages in whole pages of memory, or for none; a kernel may not have them."""
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)


def trim_heap() -> None:
    """Have the C library give freed memory back to the system, as far as it can (malloc_trim)."""
    if hasattr(_libc, "malloc_trim"):  # glibc has it, musl has not
        _libc.malloc_trim(0)
