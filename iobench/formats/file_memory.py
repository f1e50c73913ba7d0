"""FileMemory: the memory into which a whole file is restored."""

from __future__ import annotations

from typing import Any

import numpy as np

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.errors import transfer_errors
from iobench.formats.tensors import Allocate, allocate
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage, Memory

__all__ = ["FileMemory"]


class FileMemory:
    """Memory for `size_bytes` of a file, given out in parts at their file offsets.

    The memory is one piece, and the file's first byte is at the start of a page. So each block has
    the same alignment in memory and on storage, and direct reads need no copy. A tensor on a part
    has its own storage. A part that is no longer used frees its whole pages. Pages shared with a
    neighbour are freed with the last part. The pages are huge pages, which take half as long to
    touch, unless the host of a virtual machine must find them first (docs/decisions/0006).

    With `allocate`, each part is what `allocate` returns.
    """

    def __init__(self, file: str, size_bytes: int, allocate: Allocate | None = None) -> None:
        """`file` names the file in errors. Raises TransferError (ENOMEM)."""
        self._size, self._allocate = size_bytes, allocate
        self._whole: Bytes | None = None
        if allocate is None:
            with transfer_errors("making room in memory", file):
                self._whole = fresh_pages(size_bytes, huge=not host_takes_free_memory())
        self._apart: list[tuple[int, Memory]] = []

    def take(self, start: int, stop: int, unit: int) -> Memory:
        """Return memory for the file's bytes [start, stop), at a multiple of `unit`.

        `unit` is the alignment of the values, a power of 2 up to the page size. A part whose file
        offset is not a multiple of it gets separate memory.
        """
        if self._whole is not None and start % unit == 0:
            return np.asarray(_Part(self._whole, start, stop))
        memory = (self._allocate or allocate)(stop - start)
        self._apart.append((start, memory))
        return memory

    def image(self, path: str) -> FileImage:
        """Return the image of the whole file, with memory also for the parts not taken."""
        parts: list[Any] = []
        position = 0
        for start, memory in sorted(self._apart, key=lambda part: part[0]):
            parts += [self._rest(position, start), memory]
            position = start + len(memory)
        return FileImage.of(path, [*parts, self._rest(position, self._size)])

    def _rest(self, start: int, stop: int) -> Any:
        return bytearray(stop - start) if self._whole is None else self._whole[start:stop]


class _Part:
    """One part of the memory, as a numpy array interface. Its end frees its whole pages."""

    def __init__(self, whole: Bytes, start: int, stop: int) -> None:
        self._whole = whole  # kept until every part is gone
        self._address, self._length = whole.ctypes.data + start, stop - start
        self.__array_interface__ = linux.array_interface(self._address, self._length)

    def __del__(self) -> None:
        linux.give_up_pages(self._address, self._length)
