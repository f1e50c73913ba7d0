"""The files of a state directory: made once at their full size, then open for direct I/O.

StateEngine: moves memory to or from them, many pieces in flight, by io_uring, or by threads where
the kernel permits none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from iobench import linux
from iobench.errors import (
    DataMismatchError,
    TargetError,
    TransferError,
    UnavailableError,
    transfer_errors,
)
from iobench.offload.layout import BLOCK, DATA_FILES, RECORDS, StateLayout, area_bytes, areas_of
from iobench.regular_file import open_regular, read_regular
from iobench.units import format_size
from iobench.writers.blocks.interrupt_safe import Worker
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.engine import CompletionLatch, DirectOperation, OnComplete, RingEngine
from iobench.writers.direct.ring import PyuringRing, Ring
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import (
    DirectFile,
    direct_alignment,
)
from iobench.writers.local.new_file import sync_directory, write_text
from iobench.writers.local.posix import pread_all, pwrite_all
from iobench.writers.transfer import Meter

LAYOUT = "layout.json"
"""Written last: a directory without it holds no state."""


def file_sizes(layout: StateLayout) -> dict[str, int]:
    """Return the bytes of each file of a state directory."""
    sizes: dict[str, int] = {
        name: layout.slots * layout.generation_bytes(name) for name in DATA_FILES
    }
    return sizes | {RECORDS: areas_of(layout) * area_bytes(layout)}


def make_files(directory: Path, layout: StateLayout) -> None:
    """Make the files of a new state in `directory` with all their space reserved, durably.

    Raises TargetError, and leaves nothing behind, when there is too little space, or when the file
    system cannot reserve any.
    """
    sizes = file_sizes(layout)
    for name in sizes:  # of a construction that was killed: it had no layout
        (directory / name).unlink(missing_ok=True)
    try:
        for name, size in sizes.items():
            _reserve(directory / name, size)
        sync_directory(directory)
        with transfer_errors("writing", directory / LAYOUT):
            write_text(directory / LAYOUT, layout.to_json())
    except BaseException as error:
        for name in sizes:
            with contextlib.suppress(OSError):
                (directory / name).unlink(missing_ok=True)
        if isinstance(error, TargetError):
            total, free = sum(sizes.values()), os.statvfs(directory)
            raise TargetError(
                error.errno,
                f"{format_size(total)} cannot be reserved for {layout.slots} generations "
                f"({layout.slots - 2} of them pinned), "
                f"{format_size(free.f_bavail * free.f_frsize)} are free: {error.strerror}",
                str(directory),
            ) from error
        raise


def _reserve(path: Path, size: int) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            linux.fallocate(fd, 0, size)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise TargetError(error.errno, error.strerror, str(path)) from error


def read_layout(directory: Path) -> StateLayout:
    """Return the layout of the state in `directory`. Raises TargetError if there is none."""
    path = directory / LAYOUT
    try:
        return StateLayout.from_json(read_regular(path), str(path))
    except FileNotFoundError:
        raise TargetError(
            f"{directory}: holds no offload state (it has no {LAYOUT}); "
            "make one with iobench.offload.AdamW(parameters, directory)"
        ) from None
    except OSError as error:
        raise TransferError.wrap(error, "reading", path) from error


class Speed(NamedTuple):
    """`iodepth` blocks of `block_size` bytes are in flight, of reads and of writes to each file."""

    iodepth: int = 8
    block_size: int = 4 << 20


class StateFile:
    """One file of a state directory, open for direct I/O. Its size never changes.

    Raises DataMismatchError for another size than `size`, UnavailableError on a file system without
    direct I/O.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with transfer_errors("opening", path):
            self.fd = open_regular(path, os.O_RDWR | os.O_DIRECT)
        try:
            found = os.fstat(self.fd).st_size
            if found != size:
                raise DataMismatchError(f"{path}: has {found} bytes, its layout asks for {size}")
            alignment = direct_alignment("offload", self.fd, BLOCK)
        except BaseException:
            os.close(self.fd)
            raise
        self.direct = DirectFile(self.fd, alignment, str(path))

    def sync(self) -> None:
        """Make all completed writes durable. Raises TransferError."""
        with transfer_errors("syncing", self.path):
            os.fdatasync(self.fd)

    def write(self, data: bytes, offset: int) -> None:
        """Write `data`, whole blocks. Raises TransferError."""
        memory = fresh_pages(len(data), huge=False)
        memory.data[:] = data
        with transfer_errors("writing", self.path):
            pwrite_all(self.fd, [memory], offset, unit=self.direct.alignment.offset)

    def read(self, size: int, offset: int) -> Bytes:
        """Return `size` bytes, whole blocks. Raises TransferError, DataMismatchError."""
        memory = fresh_pages(size, huge=False)
        with transfer_errors("reading", self.path):
            pread_all(self.fd, [memory], offset, wanted=size, unit=self.direct.alignment.offset)
        return memory

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


_MOST_THREADS = 16


class _Uncounted(Meter):
    """A meter of a training, which would grow with every second."""

    def count(self, path: str, size_bytes: int, operations: int = 1) -> None:
        """Forget it."""


class StateEngine(RingEngine):
    """Moves aligned memory to or from state files, in place. Used by one thread.

    Its errors are TransferError and DataMismatchError with the name of the file. One of the ring
    itself is an OSError.
    """

    def __init__(self, speed: Speed, *, writes: bool) -> None:
        # Writes go to both files: with half as many in flight a step takes 1.22 times as long.
        depth = speed.iodepth * len(DATA_FILES) if writes else speed.iodepth
        ring, pool = _open_any_ring(depth), BlockPool(speed.block_size)
        super().__init__(ring, depth, pool, _Uncounted(), path="io_uring direct")
        self._writes = writes

    def move(self, file: StateFile, memory: Bytes, offset: int, on_complete: OnComplete) -> None:
        """Begin to move whole blocks, in pieces. Raises errors, possibly of an earlier piece."""
        size = self._pool.block_size
        with CompletionLatch(on_complete) as latch:
            for begin in range(0, len(memory), size):
                piece, at, ended = memory[begin : begin + size], offset + begin, latch.part()
                self.start(
                    DirectOperation(file.direct, piece, at, len(piece), ended, writes=self._writes)
                )


def _open_any_ring(depth: int) -> Ring:
    """Open a ring for `depth` operations in flight: of io_uring, or of threads without it."""
    try:
        return PyuringRing(depth)
    except UnavailableError:
        return ThreadRing(depth)


def warn_without_io_uring(depth: int) -> None:
    """Warn if `_open_any_ring` takes threads, with the reason and the remedy."""
    try:
        PyuringRing(depth).close()
    except UnavailableError as error:
        warnings.warn(
            f"{error} Until then {min(depth, _MOST_THREADS)} threads read and write in each "
            "direction, which takes more CPU time.",
            RuntimeWarning,
            stacklevel=4,
        )


_Operation = tuple[Callable[..., int], int, int, int, int, int]
"""A call, and its descriptor, address, length, offset and tag."""


class ThreadRing:
    """A Ring of threads that each do one read or write at a time."""

    def __init__(self, depth: int) -> None:
        self._begun: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._threads = [
            Worker(target=self._work, name=f"iobench-offload-io-{number}", daemon=True)
            for number in range(min(depth, _MOST_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put((os.pwritev, fd, address, length, offset, tag))

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._begun.put((os.preadv, fd, address, length, offset, tag))

    def wait(self) -> tuple[int, int]:
        return self._ended.get()

    def close(self) -> None:
        """End the threads, after all that has begun."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (operation := self._begun.get()) is not None:
            call, fd, address, length, offset, tag = operation
            memory = (ctypes.c_char * length).from_address(address)  # its user keeps it
            try:
                count = call(fd, [memory], offset)
            except BaseException as error:  # noqa: BLE001 -- a wait for it must not last for ever
                count = -(getattr(error, "errno", None) or errno.EIO)
            self._ended.put((tag, count))
