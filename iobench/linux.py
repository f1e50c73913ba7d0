"""Linux calls that Python does not wrap: statx, cachestat, fallocate, mbind and others.

Each function raises OSError with the kernel's errno. Numbers are from the kernel's uapi headers.
ctypes releases the GIL during each call.
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
from typing import Any

RWF_DONTCACHE = 0x80  # linux/fs.h, since 6.14
SYNC_FILE_RANGE_WAIT_BEFORE, SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_WAIT_AFTER = 1, 2, 4
PAGE = mmap.PAGESIZE

_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_STATX_ATTR_DAX = 0x00200000
_AT_EMPTY_PATH = 0x1000
_SYS_STATX = {"x86_64": 332, "aarch64": 291}
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_BE, _IOPRIO_CLASS_SHIFT = 1, 2, 13  # linux/ioprio.h
_LOWEST = 7
_SYS_FSYNC = {"x86_64": 74, "aarch64": 82}
_SYS_CACHESTAT = 451  # since 6.5, the same number on both architectures
_OVERLAYFS_MAGIC = 0x794C7630  # linux/magic.h
_FALLOC_DEFAULT = 0
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # asm-generic/mman.h
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2  # linux/mempolicy.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_MNT_DETACH = 2  # linux/fs.h

# use_errno keeps a copy of errno per thread: without it other C calls of the interpreter may change
# errno before get_errno reads it.
_libc = ctypes.CDLL(None, use_errno=True)
_off, _size = ctypes.c_int64, ctypes.c_size_t
# ctypes passes plain integers as 32-bit ints: offsets and addresses need their types declared.
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _off, _off]
_libc.sync_file_range.argtypes = [ctypes.c_int, _off, _off, ctypes.c_uint]
_libc.mincore.argtypes = [ctypes.c_void_p, _size, ctypes.c_void_p]
_libc.mmap.argtypes = [ctypes.c_void_p, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, _off]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, _size]
_libc.madvise.argtypes = [ctypes.c_void_p, _size, ctypes.c_int]


class _Statx(ctypes.Structure):
    """struct statx, linux/stat.h: 256 bytes. Only the fields that are used have names."""

    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("_block_size", ctypes.c_uint32),
        ("stx_attributes", ctypes.c_uint64),
        ("_until_dio", ctypes.c_uint8 * 136),
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
    """Alignment in bytes that O_DIRECT requires for one file: of memory, of offsets and sizes."""

    memory: int
    offset: int


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _repeated(call: Callable[[], int]) -> None:
    """Check a call, and repeat it when a signal interrupts it (EINTR), as Python does (PEP 475).

    Of the calls here only fallocate and statfs return EINTR. The signal's handler runs between two
    tries; an exception that it raises ends the loop.
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
    """Return the alignment for O_DIRECT on the open file `fd`; None if it is not reported.

    Zeros mean that the file does not support direct I/O, as in statx(2).
    """
    buffer = _statx(fd, _STATX_DIOALIGN)
    # The mask reports which fields were filled: kernels before 6.1 and many file systems (btrfs,
    # tmpfs, FUSE) leave these two out.
    if buffer is None or not buffer.stx_mask & _STATX_DIOALIGN:
        return None
    return DioAlignment(memory=buffer.stx_dio_mem_align, offset=buffer.stx_dio_offset_align)


def is_dax(fd: int) -> bool:
    """Whether the open file `fd` is memory that is mapped directly (DAX), by statx(2)."""
    buffer = _statx(fd, 0)
    return buffer is not None and bool(buffer.stx_attributes & _STATX_ATTR_DAX)


def _statx(fd: int, mask: int) -> _Statx | None:
    number = _SYS_STATX.get(platform.machine())
    if number is None:
        return None
    buffer = _Statx()
    _check(
        _libc.syscall(ctypes.c_long(number), fd, b"", _AT_EMPTY_PATH, mask, ctypes.byref(buffer))
    )
    return buffer


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
    """Return the same by mapping the file and asking mincore(2).

    The caller needs write permission or ownership: since Linux 5.2 mincore reports all pages of
    other files as resident.
    """
    length = os.fstat(fd).st_size
    if not length:
        return 0
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        _check(-1)
    try:
        pages = (ctypes.c_ubyte * -(-length // PAGE))()
        _check(_libc.mincore(address, length, pages))
        # Only the lowest bit of each byte means "resident"; mincore(2) reserves the others.
        return sum(page & 1 for page in bytes(pages)) * PAGE
    finally:
        _libc.munmap(address, length)


def kernel_fsync(fd: int) -> None:
    """fsync(2) by its number, past the C library.

    A preloaded library that makes syncs do nothing (libeatmydata) replaces the functions of the C
    library and not the system call. On other processors this is `os.fsync`.
    """
    number = _SYS_FSYNC.get(platform.machine())
    if number is None:
        os.fsync(fd)
        return
    _repeated(lambda: _libc.syscall(ctypes.c_long(number), fd))


def resident_bytes(fd: int) -> tuple[int, str]:
    """Return the file's bytes in the page cache and the method: "cachestat" or "mincore"."""
    # The pages of a file on overlayfs belong to the file beneath, which cachestat does not look at:
    # it counts none. mmap does reach that file.
    if file_system_type(f"/proc/self/fd/{fd}") != _OVERLAYFS_MAGIC:
        try:
            return cachestat_resident_bytes(fd), "cachestat"
        except OSError as error:
            # ENOSYS: kernel before 6.5. EOPNOTSUPP: hugetlbfs. EPERM: a container's seccomp filter,
            # or on newer kernels a file that the caller neither owns nor may write.
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
    return mincore_resident_bytes(fd), "mincore"


def fallocate(fd: int, offset: int, length: int) -> None:
    """Reserve blocks by fallocate(2).

    posix_fallocate of glibc would write to every block where the file system cannot reserve them;
    this call raises EOPNOTSUPP there.
    """
    _repeated(lambda: _libc.fallocate(fd, _FALLOC_DEFAULT, offset, length))


def sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    """Start write-back of a byte range, or wait for it.

    It makes nothing durable: it writes no metadata and does not flush the device's cache.
    """
    _check(_libc.sync_file_range(fd, offset, length, flags))


def give_up_pages(address: int, length: int) -> None:
    """Free the whole pages inside a range of private memory; the next access reads zeros.

    madvise refuses locked pages (EINVAL): they keep their content, and no error is raised.
    """
    start = address + -address % PAGE
    length = (address + length) // PAGE * PAGE - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_DONTNEED)


def array_interface(address: int, length: int, *, readonly: bool = False) -> dict[str, Any]:
    """Return numpy's description of `length` bytes, for `__array_interface__`."""
    return {"shape": (length,), "typestr": "|u1", "data": (address, readonly), "version": 3}


class MemorySpan:
    """`length` bytes at `address` for numpy; every array on them keeps `owners` alive."""

    def __init__(
        self, address: int, length: int, owners: object, *, readonly: bool = False
    ) -> None:
        self.owners = owners
        self.__array_interface__ = array_interface(address, length, readonly=readonly)


def map_memory(
    address: int | None, length: int, protection: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    """Map memory by mmap(2), and return its address. With MAP_FIXED it replaces what is there."""
    mapped = _libc.mmap(address, length, protection, flags, fd, offset)
    if mapped == ctypes.c_void_p(-1).value:
        _check(-1)
    return int(mapped)


def unmap_memory(address: int, length: int) -> None:
    """Unmap what is mapped in this range."""
    _libc.munmap(address, length)


def keep_from_children(address: int, length: int) -> None:
    """Leave the pages of a mapping out of children that are forked from now on."""
    _check(_libc.madvise(address, length, mmap.MADV_DONTFORK))


def bind_to_node(address: int, length: int, node: int) -> None:
    """Let the pages of a mapped range, which has none yet, come from one NUMA node (mbind).

    Raises EINVAL if the node does not exist, has no memory or is not allowed by the cpuset, and
    EPERM if a seccomp filter forbids the call.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel subtracts one from the number of bits (mm/mempolicy.c, get_nodes).
    count = ctypes.c_ulong(len(mask) * bits + 1)
    _check(
        _libc.syscall(
            *(ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length)),
            *(ctypes.c_long(_MPOL_BIND), mask, count, ctypes.c_long(0)),
        )
    )


class RepeatedMapping:
    """A memory file of `size_bytes`, mapped repeatedly in a row up to `total_bytes`.

    `numpy.asarray(mapping)` is one array of all of it, and keeps the mapping alive. Sizes are
    multiples of the page size.
    """

    def __init__(self, size_bytes: int, total_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._address = self._total = 0
        fd = os.memfd_create("iobench-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            # Reserves the addresses: MAP_FIXED below would replace any mapping that is in its way.
            address = map_memory(None, total_bytes, 0, flags)
            self._address, self._total = address, total_bytes
            for start in range(0, total_bytes, size_bytes):
                length = min(size_bytes, total_bytes - start)
                map_memory(address + start, length, 3, mmap.MAP_SHARED | MAP_FIXED, fd)
        finally:
            os.close(fd)
        self.__array_interface__ = array_interface(address, total_bytes)

    def forget(self, start: int) -> None:
        """Unmap the pages from `start` on and keep their content; the next access maps them again.

        For shared memory MADV_DONTNEED drops only this process's page-table entries. A long window
        then counts as resident memory only as far as it is in use.
        """
        length = self._total - start
        if length > 0:
            _check(_libc.madvise(self._address + start, length, mmap.MADV_DONTNEED))

    def __del__(self) -> None:
        if self._address:
            unmap_memory(self._address, self._total)


TMPFS = 0x01021994
"""The magic number of tmpfs, see `file_system_type`."""


def file_system_type(path: str | Path) -> int:
    """Return the magic number of the file system of `path`, as in linux/magic.h (statfs)."""
    buffer = (ctypes.c_long * 32)()  # room for struct statfs, whose first field is f_type
    name = os.fsencode(path)
    _repeated(lambda: _libc.statfs(name, buffer))
    return buffer[0]


def sync_file(path: str | Path, flags: int = 0) -> None:
    """Put a file or directory on storage; `flags` are additional ones for open(2)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(fd: int) -> None:
    """Make everything on the file system of the open file or directory `fd` durable (syncfs)."""
    _check(_libc.syncfs(fd))


def exchange_names(one: str, other: str) -> None:
    """Exchange the names of two files or directories of one file system atomically (renameat2).

    Raises EINVAL if the file system does not support it, ENOSYS if the kernel or the C library
    does not.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = (os.fsencode(one), os.fsencode(other))
    _check(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE))


def detach_mount(fd: int) -> None:
    """Unmount the file system whose root is open as `fd`; open files stay usable (umount2)."""
    _check(_libc.umount2(f"/proc/self/fd/{fd}".encode(), _MNT_DETACH))


def yield_to_others(nice: int) -> None:
    """Lower the calling thread's CPU priority to `nice` and its I/O priority to the lowest.

    A thread that already has a lower CPU priority keeps it. The I/O priority is best-effort 7:
    requests of the idle class may never be served (ioprio_set(2)). New threads inherit both.
    Raising the CPU priority again needs privilege.
    """
    own = threading.get_native_id()  # on Linux both calls act on a thread, given its id
    os.setpriority(os.PRIO_PROCESS, own, max(nice, os.getpriority(os.PRIO_PROCESS, own)))
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if number is not None:
        priority = _IOPRIO_CLASS_BE << _IOPRIO_CLASS_SHIFT | _LOWEST
        _check(_libc.syscall(ctypes.c_long(number), _IOPRIO_WHO_PROCESS, 0, priority))


def populate(address: int, length: int) -> None:
    """Allocate the pages of a memory range now, not on first access (Linux >= 5.14)."""
    _check(_libc.madvise(address, length, _MADV_POPULATE_WRITE))


def has_page(address: int) -> bool:
    """Whether the memory at `address` already has a page, by mincore(2)."""
    page = ctypes.c_ubyte()
    _check(_libc.mincore(address - address % PAGE, 1, ctypes.byref(page)))
    return bool(page.value & 1)


def advise_huge(address: int, length: int, *, huge: bool) -> None:
    """Ask for huge pages, or for none, in whole pages of memory.

    A kernel without transparent huge pages refuses (EINVAL). This is a hint, so no error is raised.
    """
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)


def trim_heap() -> None:
    """Let the C library return freed memory to the system (malloc_trim)."""
    if hasattr(_libc, "malloc_trim"):  # glibc has it, musl does not
        _libc.malloc_trim(0)
