"""AddressRange: one piece of address space whose parts come from several memories."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

from iobench import linux
from iobench.writers.image import Bytes

__all__ = ["AddressRange"]


class AddressRange:
    """`size_bytes` of addresses from a multiple of `alignment`, without memory at first.

    Parts are mapped into it at `address`. `numpy` arrays on it keep it alive; with the last one it
    is unmapped, and then the calls of `afterwards` are made.
    """

    def __init__(self, size_bytes: int, alignment: int) -> None:
        self._base = self._length = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | linux.MAP_NORESERVE
        length = size_bytes + alignment
        self._base, self._length = linux.map_memory(None, length, 0, flags), length
        self.address = self._base + -self._base % alignment
        self.afterwards: list[Callable[[], None]] = []
        self.__array_interface__ = linux.array_interface(self.address, size_bytes)

    def array(self) -> Bytes:
        """Return all of it."""
        whole: Bytes = np.asarray(self)
        return whole

    def __del__(self) -> None:
        if self._length:
            linux.unmap_memory(self._base, self._length)
            for call in self.afterwards:
                call()
