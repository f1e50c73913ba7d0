"""Read-back: compares the files of a checkpoint in a tier with the checksums of its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import xxhash

from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError, transfer_errors
from iobench.remote.source_file import BLOCK_BYTES
from iobench.writers.image import Bytes
from iobench.writers.source import Source

__all__ = ["compare_file", "read_back"]


def read_back(
    files: Iterable[FileRecord],
    location: str | Path,
    open_source: Callable[[str], Source],
    pace: Callable[[int], None],
) -> None:
    """Read these files of the checkpoint in `location` and compare each piece with its checksum.

    Memory of one block is enough. `pace` is called before each block with its bytes. Raises
    DataMismatchError that names the file and the piece, and TransferError.
    """
    for record in files:
        where = os.path.join(location, record.path)
        with transfer_errors("reading back", where), closing(open_source(where)) as source:
            compare_file(record, _blocks(source, record.size_bytes, where, pace), where)


def _blocks(
    source: Source, size_bytes: int, where: str, pace: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the file in order. Raises DataMismatchError if it has another size."""
    left = size_bytes
    while left:
        pace(min(left, BLOCK_BYTES))
        data = source.read(min(left, BLOCK_BYTES))
        if not data:
            raise DataMismatchError(f"{where}: ends {left} bytes too early")
        left -= len(data)
        yield data
    if source.read(1):
        raise DataMismatchError(f"{where}: has more than {size_bytes} bytes")


def compare_file(record: FileRecord, blocks: Iterator[bytes | Bytes], where: str) -> None:
    """Compare the pieces of one file with its bytes. Raises DataMismatchError."""
    rest = memoryview(b"")
    for piece in record.pieces:
        digest, left = xxhash.xxh3_64(), piece.size_bytes
        while left:
            if not rest:
                found = next(blocks, None)
                if found is None:
                    raise DataMismatchError(f"{where}: its manifest has more bytes than the file")
                rest = memoryview(found if isinstance(found, bytes) else found.data)
            digest.update(rest[:left])
            rest, left = rest[left:], max(0, left - len(rest))
        if digest.hexdigest() != piece.xxh3_64:
            raise DataMismatchError(
                f"{where}: damaged, the checksum of {piece.name or 'the header'} differs"
            )
    if rest or next(blocks, None) is not None:
        raise DataMismatchError(f"{where}: has bytes that its manifest does not name")
