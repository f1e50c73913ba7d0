"""PinClones: clones of pinned generations, on file systems with reflinks (xfs, btrfs).

A clone shares the blocks of the slots. A later write to such a slot allocates new blocks (copy on
write), so the clone keeps its bytes and the slot is free. See docs/decisions/0055.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from iobench import linux
from iobench.errors import DataMismatchError, TargetError, transfer_errors
from iobench.offload.files import StateFile
from iobench.offload.layout import BLOCK, DataFile, StateLayout
from iobench.writers.local.new_file import sync_directory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from iobench.offload.record import GenerationRecord

__all__ = ["PinClones", "can_clone", "clones_bytes"]

_NAMES: tuple[DataFile, ...] = ("state", "parameters")
_CLONE = re.compile(r"pin-(\d+)\.(?:state|parameters)")
_REFUSED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.ENOSYS}
"""Errors of a file system without reflinks, or whose blocks are larger than ours."""


def can_clone(directory: Path) -> bool:
    """Return whether one file can share a block with another in `directory`, by trying.

    Raises TargetError when nothing can be written there.
    """
    try:
        with (
            tempfile.TemporaryFile(dir=directory) as one,
            tempfile.TemporaryFile(dir=directory) as other,
        ):
            one.write(bytes(2 * BLOCK))
            one.flush()
            try:
                linux.clone_range(one.fileno(), BLOCK, BLOCK, other.fileno(), 0)
            except OSError as error:
                if error.errno in _REFUSED:
                    return False
                raise
    except OSError as error:
        raise TargetError(error.errno, error.strerror, str(directory)) from error
    return True


def clones_bytes(directory: Path) -> int:
    """Return the size of all clones in `directory`, where a trainer may be at work."""
    total = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # its pin was given up meanwhile
            total += path.stat().st_size if _CLONE.fullmatch(path.name) else 0
    return total


class PinClones:
    """The files `pin-GENERATION.state` and `pin-GENERATION.parameters` of a state directory.

    Each has one place for every chunk. Rows refer to it by a slot number after those of the layout.
    """

    def __init__(self, directory: Path, layout: StateLayout) -> None:
        self._directory, self._layout = directory, layout

    def slot(self, generation: int) -> int:
        """Return the slot number of the clone of `generation`."""
        return self._layout.slots + generation

    def in_clone(self, record: GenerationRecord) -> GenerationRecord:
        """Return `record` with the rows of its clone."""
        rows = record.rows.copy()
        rows["slot"] = self.slot(record.generation)
        return replace(record, rows=rows)

    def open(self, name: DataFile, slot: int) -> StateFile:
        """Open the file of the clone with this slot number; the caller closes it.

        Raises DataMismatchError when it is missing or has another size, and TransferError.
        """
        path = self._path(name, slot - self._layout.slots)
        if not path.exists():
            raise DataMismatchError(f"{path}: missing")
        return StateFile(path, self._layout.generation_bytes(name))

    def make(
        self, generation: int, rows: npt.NDArray[np.void], state: StateFile, parameters: StateFile
    ) -> None:
        """Clone the chunks in `rows`, which are durable in these files; durable on return.

        Raises TransferError: what it leaves behind is removed by the next `remove_others`.
        """
        for name, file in zip(_NAMES, (state, parameters), strict=True):
            path = self._path(name, generation)
            with transfer_errors("cloning to", path):
                path.unlink(missing_ok=True)  # of a process that was killed before its record
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    self._clone(name, rows, file, fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)
        with transfer_errors("syncing", self._directory):
            sync_directory(self._directory)

    def _clone(self, name: DataFile, rows: npt.NDArray[np.void], file: StateFile, fd: int) -> None:
        layout = self._layout
        for chunk, slot in enumerate(rows["slot"].tolist()):
            with self.file_of(name, slot, file) as source:
                linux.clone_range(
                    source.fd,
                    layout.offset(name, chunk, slot),
                    layout.chunk_bytes(name, chunk),
                    fd,
                    layout.offset(name, chunk, 0),
                )

    @contextmanager
    def file_of(self, name: DataFile, slot: int, file: StateFile) -> Iterator[StateFile]:
        """The file of a slot: `file`, or an older clone of a chunk that has not changed since."""
        if slot < self._layout.slots:
            yield file
            return
        clone = self.open(name, slot)
        try:
            yield clone
        finally:
            clone.close()

    def remove_others(self, slots: Collection[int]) -> None:
        """Remove all clones but those with these slot numbers."""
        for path in self._directory.iterdir():
            found = _CLONE.fullmatch(path.name)
            if found and self.slot(int(found[1])) not in slots:
                path.unlink(missing_ok=True)

    def _path(self, name: DataFile, generation: int) -> Path:
        return self._directory / f"pin-{generation}.{name}"
