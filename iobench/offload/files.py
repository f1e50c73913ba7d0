"""The files of a state directory: made once at their full size, then open for direct I/O."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from iobench import linux
from iobench.errors import DataMismatchError, TargetError, TransferError, transfer_errors
from iobench.offload.layout import BLOCK, DATA_FILES, StateLayout
from iobench.offload.record import RECORDS, area_bytes, areas_of
from iobench.regular_file import open_regular, read_regular
from iobench.units import format_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import direct_alignment, pread_direct, pwrite_direct
from iobench.writers.local.new_file import sync_directory, write_text

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
    """`iodepth` blocks of `block_size` bytes are in flight in each direction."""

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
            self.alignment = direct_alignment("offload", self.fd, BLOCK)
        except BaseException:
            os.close(self.fd)
            raise

    def sync(self) -> None:
        """Make all completed writes durable. Raises TransferError."""
        with transfer_errors("syncing", self.path):
            os.fdatasync(self.fd)

    def write(self, data: bytes, offset: int) -> None:
        """Write `data`, whole blocks. Raises TransferError."""
        memory = fresh_pages(len(data), huge=False)
        memory.data[:] = data
        with transfer_errors("writing", self.path):
            pwrite_direct(self.fd, memory, offset, self.alignment.offset)

    def read(self, size: int, offset: int) -> Bytes:
        """Return `size` bytes, whole blocks. Raises TransferError, DataMismatchError."""
        memory = fresh_pages(size, huge=False)
        with transfer_errors("reading", self.path):
            pread_direct(self.fd, memory, offset, size, self.alignment.offset)
        return memory

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
