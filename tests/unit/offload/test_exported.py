"""Files of a pinned generation in a remote tier."""

from __future__ import annotations

from pathlib import Path

import xxhash

from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.piece_reader import PieceReader, StoredPiece
from iobench.units import GIB
from iobench.writers.base import StoredReader
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import Bytes


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A chunk of it takes the memory of that chunk: no address space for the whole file."""
    size, digest = 1024 * GIB, xxhash.xxh3_64_hexdigest(b"bytes")
    with (tmp_path / "optimizer-state").open("wb") as file:
        file.truncate(size)
        for offset in (0, size // 2, size - 5):
            file.seek(offset)
            file.write(b"bytes")
    files = {"optimizer-state": FileRecord(path="optimizer-state", size_bytes=size, pieces=())}
    for offset in (0, size // 2, size - 5):
        piece = StoredPiece("optimizer-state", offset, offset + 5, digest, "chunk")
        found: list[bytes] = []

        def deliver(_: StoredPiece, data: Bytes, found: list[bytes] = found) -> bool:
            found.append(bytes(data))
            return False

        PieceReader().read(StoredReader(BufferedWriter(), tmp_path), files, [piece], deliver)
        assert found == [b"bytes"]
