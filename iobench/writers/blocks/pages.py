"""Fresh memory that begins with a page, huge or not."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["HUGE_PAGE", "Bytes", "fresh_pages"]

Bytes = npt.NDArray[np.uint8]
"""One dimension of bytes: host memory inside iobench."""

HUGE_PAGE = 2 << 20
"""Bytes of a huge page of x86-64 and, with 4 KiB pages, arm64."""


def fresh_pages(size_bytes: int, *, huge: bool) -> Bytes:
    """`size_bytes` of zeros that begin with a page, or a huge one where the kernel gives them.

    What is beyond the last whole huge page is in ordinary ones. The memory goes when the last array
    on it does. Raises OSError (ENOMEM).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=flags)
    room = np.frombuffer(memory, dtype=np.uint8)
    begin = -room.ctypes.data % HUGE_PAGE
    if huge and (whole := size_bytes - size_bytes % HUGE_PAGE):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return room[begin : begin + size_bytes]
