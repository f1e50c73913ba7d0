"""What formats need to restore a file: FileMemory and InspectedFile."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Self

import numpy as np

from iobench import linux
from iobench.errors import DataMismatchError, transfer_errors
from iobench.formats.tensors import Allocate, allocate
from iobench.units import KIB
from iobench.writers.base import CopyReader, LocalSource, Source, Writer
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.image import AnyMemory, Bytes, DeviceBytes, FileImage

RUN_BYTES = 256 * KIB
"""The most memory that a tensor keeps of its neighbours. A run costs 4 us, a part in it 0.2 us."""
Inspectable = Writer | CopyReader
"""What opens files to inspect them."""


class FileMemory:
    """Memory for `size_bytes` of a file, given out in parts at their file offsets.

    The memory is one piece, and the file's first byte is at the start of a page. So each block has
    the same alignment in memory and on storage, and direct reads need no copy. A tensor on a part
    has its own storage. Consecutive parts form a run of up to `RUN_BYTES`; a larger part is a run
    of its own. A run frees its whole pages when none of its parts is used any more. Pages shared
    with a neighbour are freed with the last run.

    With `allocate`, each part is what `allocate` returns.
    """

    def __init__(self, file: str, size_bytes: int, allocate: Allocate | None = None) -> None:
        """`file` names the file in errors. Raises TransferError (ENOMEM)."""
        self._size, self._allocate = size_bytes, allocate
        self._whole: Bytes | None = None
        if allocate is None:
            with transfer_errors("making room in memory", file):
                self._whole = pages_to_read_into(size_bytes)
        self._apart: list[tuple[int, AnyMemory]] = []
        self._run: tuple[_Run, Bytes] | None = None
        self._taken = 0  # a run frees everything between its parts: no later part is before here

    def take(self, start: int, stop: int, unit: int) -> AnyMemory:
        """Return memory for the file's bytes [start, stop), at a multiple of `unit`.

        `unit` is the alignment of the values, a power of 2 up to the page size. A part whose file
        offset is not a multiple of it gets separate memory, and so does a part before an earlier
        one.
        """
        if self._whole is None or start % unit or start < self._taken:
            memory = (self._allocate or allocate)(stop - start)
            self._apart.append((start, memory))
            return memory
        if self._run is None or stop - self._run[0].start > RUN_BYTES:
            run = _Run(self._whole, start, max(stop, start + RUN_BYTES))
            self._run = run, np.asarray(run)
        self._taken = stop
        run, memory = self._run
        run.used = stop - run.start
        return memory[start - run.start : stop - run.start]

    def image(self, path: str) -> FileImage:
        """Return the image of the whole file, with memory also for the parts not taken.

        No part is taken after it.
        """
        self._run = None
        parts: list[Any] = []
        position = 0
        for start, memory in sorted(self._apart, key=lambda part: part[0]):
            parts += [self._rest(position, start), memory]
            position = start + len(memory)
        return FileImage.of(path, [*parts, self._rest(position, self._size)])

    def _rest(self, start: int, stop: int) -> Any:
        return bytearray(stop - start) if self._whole is None else self._whole[start:stop]


class _Run:
    """Consecutive parts as a numpy array. Its end frees the whole pages of the `used` bytes."""

    def __init__(self, whole: Bytes, start: int, most: int) -> None:
        """The run begins at `start` of the file and ends at `most` at the latest."""
        self._whole, self.start = whole, start  # kept until every run is gone
        self._address, self.used = whole.ctypes.data + start, 0
        length = min(most, len(whole)) - start
        self.__array_interface__ = linux.array_interface(self._address, length)

    def __del__(self) -> None:
        linux.give_up_pages(self._address, self.used)


class InspectedFile(io.RawIOBase):
    """A file whose header or index a format reads before it can restore the file.

    The restore opens the file by name again. If another file got this name in between, its bytes
    would be read with the wrong header. `check` finds this.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._given: dict[int, bytes] = {}

    @classmethod
    @contextmanager
    def opened(cls, file: str, writer: Inspectable | None) -> Iterator[Self]:
        """Open `file` through `writer`, or in a mounted file system. Raises TransferError."""
        with transfer_errors("opening", file):
            source: Source = LocalSource(file) if writer is None else writer.open_source(file)
        with closing(source):
            yield cls(source)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        position = self._source.tell()
        data = self._source.read(len(room))
        room[: len(data)] = data
        self._remember(position, data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        listed = list(offsets)
        found = self._source.read_at(listed, size)
        for offset, data in zip(listed, found, strict=True):
            self._remember(offset, data)
        return found

    def _remember(self, offset: int, data: bytes) -> None:
        if len(data) > len(self._given.get(offset, b"")):
            self._given[offset] = data

    def check(self, file: str, image: FileImage) -> None:
        """Raise DataMismatchError unless the filled `image` has the bytes that were inspected.

        Bytes on a device are not compared: they are tensor data, which formats do not inspect.
        """
        for offset, data in self._given.items():
            position = 0
            for piece in image.pieces(offset, offset + len(data)):
                wanted = data[position : position + len(piece)]
                position += len(piece)
                if not isinstance(piece, DeviceBytes) and piece.tobytes() != wanted:
                    raise DataMismatchError(
                        f"{file}: was changed while it was read (the bytes near {offset} differ); "
                        "restore it again"
                    )
