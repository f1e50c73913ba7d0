"""SourceFile: a file of a local checkpoint, read range by range for a copy to another tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from iobench.checkpoint.manifest import FileRecord, PinnedGeneration
from iobench.errors import DataMismatchError, TransferError
from iobench.regular_file import open_regular
from iobench.units import MIB
from iobench.writers.image import AnyMemory, Bytes, FileImage

BLOCK_BYTES = 8 * MIB


class LocalDamageError(DataMismatchError):
    """The local files of a checkpoint cannot be read, or are not those of its manifest."""


class SourceFile:
    """The file `name` of the checkpoint in `directory`; its manifest says `size_bytes`.

    Ranges are read with pread(2), by any thread. A mapping of the file would end the process with
    SIGBUS when its disk fails. Read pages leave the page cache: a copy must not displace the data
    of the training. Close it, or use it as a context manager.
    """

    def __init__(self, directory: Path, name: str, size_bytes: int) -> None:
        """Open the file. Raises LocalDamageError."""
        self.name, self.size_bytes = name, size_bytes
        self._path = directory / name
        try:
            self._fd = open_regular(self._path)
        except OSError as error:
            raise self._damage(error) from error
        found = os.fstat(self._fd).st_size
        if found != size_bytes:
            self.close()
            raise LocalDamageError(
                f"{self._path}: has {found} bytes, its manifest says {size_bytes}"
            )

    def fill(self, start: int, block: Bytes) -> None:
        """Fill `block` with the bytes from `start` on. Raises LocalDamageError."""
        done = 0
        try:
            while done < len(block):
                count = os.preadv(self._fd, [block.data[done:]], start + done)
                if not count:
                    raise LocalDamageError(f"{self._path}: ends at byte {start + done}")
                done += count
            os.posix_fadvise(self._fd, start, len(block), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._damage(error) from error

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes [start, stop). Raises LocalDamageError."""
        block = np.empty(stop - start, dtype=np.uint8)
        self.fill(start, block)
        return block

    def image(self) -> FileImage:
        """Return its bytes for a writer, which reads them when it takes them."""
        return _SourceImage(self)

    def _damage(self, error: OSError) -> LocalDamageError:
        return LocalDamageError(str(TransferError.wrap(error, "reading", self._path)))

    def blocks(self, size_bytes: int = BLOCK_BYTES) -> Iterator[Bytes]:
        """Yield the whole file in order, in blocks of `size_bytes`."""
        for start in range(0, self.size_bytes, size_bytes):
            yield self.read(start, min(start + size_bytes, self.size_bytes))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SourceImage(FileImage):
    """The bytes of `source`, in no memory until a writer asks for them."""

    def __init__(self, source: SourceFile) -> None:
        self._describe(source.name, [], source.size_bytes)
        self._parts, self._source = [], source

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        return [self._source.read(start, stop)]

    def in_one_piece(self, start: int, stop: int) -> bool:
        """Return False: a block of the writer, not memory that is made for it, is filled."""
        del start, stop
        return False

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        self._source.fill(start, block[: stop - start])
        return stop - start


class PinnedFiles(Protocol):
    """Optimizer state on storage, whose pinned generations are copied with their checkpoints."""

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> SourceFile:
        """Open one of `pinned.files`. For any thread. Raises LocalDamageError."""
