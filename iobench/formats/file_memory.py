"""FileMemory: the memory into which a whole file is restored."""

from __future__ import annotations

from typing import Any

import numpy as np

from iobench import linux
from iobench.errors import transfer_errors
from iobench.formats.tensors import Allocate, allocate
from iobench.units import KIB
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.image import AnyMemory, Bytes, FileImage

RUN_BYTES = 256 * KIB
"""The most memory that a tensor keeps of its neighbours. A run costs 4 us, a part in it 0.2 us."""


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
        self._run: _Run | None = None
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
        if self._run is None or stop - self._run.start > RUN_BYTES:
            self._run = _Run(self._whole, start, max(stop, start + RUN_BYTES))
        self._taken = stop
        return self._run.part(start, stop)

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
    """Memory of consecutive parts, given out as slices of one array. Its end frees its pages."""

    def __init__(self, whole: Bytes, start: int, most: int) -> None:
        """The run begins at `start` of the file and ends at `most` at the latest."""
        self.start = start
        self._pages = _Pages(whole, start, min(most, len(whole)))
        self._memory = np.asarray(self._pages)

    def part(self, start: int, stop: int) -> Bytes:
        """Return the file's bytes [start, stop), which follow those of all earlier parts."""
        self._pages.used = stop - self.start
        return self._memory[start - self.start : stop - self.start]


class _Pages:
    """A numpy array interface over a run. Its end frees the whole pages of the `used` bytes."""

    def __init__(self, whole: Bytes, start: int, stop: int) -> None:
        self._whole = whole  # kept until every run is gone
        self._address, self.used = whole.ctypes.data + start, 0
        self.__array_interface__ = linux.array_interface(self._address, stop - start)

    def __del__(self) -> None:
        linux.give_up_pages(self._address, self.used)
