"""fresh_pages: new memory that begins at a page boundary, huge pages where possible."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["HUGE_PAGE", "Bytes", "fresh_pages"]

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
"""A one-dimensional array of bytes: host memory inside iobench."""

HUGE_PAGE = 2 << 20
"""The size of a huge page in bytes, on x86-64 and on arm64 with pages of 4 KiB."""


def fresh_pages(size_bytes: int, *, huge: bool) -> Bytes:
    """Return `size_bytes` of zeros, aligned to a huge page.

    With `huge` they are in huge pages where the kernel provides them; the part after the last whole
    huge page is in ordinary pages. The memory is freed with the last array that refers to it.
    Raises OSError (ENOMEM).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # mmap aligns to a small page only: map one huge page more, and begin at a boundary inside.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=flags)
    room = np.frombuffer(memory, dtype=np.uint8)
    begin = -room.ctypes.data % HUGE_PAGE
    if huge and (whole := size_bytes - size_bytes % HUGE_PAGE):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return room[begin : begin + size_bytes]
