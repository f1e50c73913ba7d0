"""The file of a pinned generation in a remote tier, read in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from iobench.checkpoint.manifest import FileRecord
from iobench.offload.exported import ExportedState
from iobench.units import GIB
from iobench.writers.buffered import BufferedWriter


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A part of it takes the memory of that part: no address space for the whole file."""
    size = 1024 * GIB
    with (tmp_path / "optimizer-state").open("wb") as file:
        file.truncate(size)
        for offset in (0, size // 2, size - 5):
            file.seek(offset)
            file.write(b"bytes")
    state = ExportedState.__new__(ExportedState)
    state._file = FileRecord(path="optimizer-state", size_bytes=size, pieces=())
    state._location, state._writer = tmp_path, BufferedWriter()
    for offset in (0, size // 2, size - 5):
        memory = np.zeros(5, dtype=np.uint8)
        state._read_range(offset, memory)
        assert memory.tobytes() == b"bytes"
