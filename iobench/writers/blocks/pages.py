"""Memory. fresh_pages: new, aligned to huge pages; make_pages: its pages, before an access.

DeviceBytes: memory of an image that is not on the host. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

from iobench import linux
from iobench.environment.memory import host_takes_free_memory

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
"""A one-dimensional array of bytes: host memory inside iobench."""
AnyMemory: TypeAlias = "Bytes | DeviceBytes"
"""The memory of a segment: on the host or on a device."""

HUGE_PAGE = 2 << 20
"""The size of a huge page in bytes, on x86-64 and on arm64 with pages of 4 KiB."""


class DeviceBytes:
    """Contiguous bytes in the memory of a `Device` of `device.cuda`, which the host cannot access.

    `tensor` has the same bytes as a torch tensor of uint8. A slice shares the memory.
    """

    def __init__(self, tensor: Any, device: Any) -> None:
        self.tensor, self.device = tensor, device

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        found: int = self.tensor.data_ptr()
        return found

    def __len__(self) -> int:
        length: int = self.tensor.numel()
        return length

    def __getitem__(self, part: slice) -> Self:
        return type(self)(self.tensor[part], self.device)


def fresh_pages(size_bytes: int, *, huge: bool) -> Bytes:
    """Return `size_bytes` of zeros, aligned to a huge page.

    With `huge` they are in huge pages where the kernel provides them; the part after the last whole
    huge page is in ordinary pages. The memory is freed with the last array that refers to it.
    Raises OSError (ENOMEM).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # mmap aligns to a small page only: map one huge page more, and begin at a boundary inside.
    memory = (_HugeMapping if huge else mmap.mmap)(-1, size_bytes + HUGE_PAGE, flags=flags)
    room = np.frombuffer(memory, dtype=np.uint8)
    begin = -room.ctypes.data % HUGE_PAGE
    if huge and (whole := size_bytes - size_bytes % HUGE_PAGE):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return room[begin : begin + size_bytes]


def pages_to_read_into(size_bytes: int) -> Bytes:
    """Return `fresh_pages` for bytes from storage: huge ones, which take half as long to touch.

    They are small where the host of a virtual machine must find huge pages first
    (docs/decisions/0033). Raises OSError (ENOMEM).
    """
    return fresh_pages(size_bytes, huge=not host_takes_free_memory())


class _HugeMapping(mmap.mmap):
    """Memory for which huge pages were asked."""


def in_huge_pages(memory: Bytes) -> bool:
    """Whether `memory` is a part of what `fresh_pages` returned with `huge`."""
    base: object = memory
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(getattr(base, "obj", base), _HugeMapping)  # numpy keeps a memoryview of it


def make_pages(memory: Bytes) -> bool:
    """Make the pages of `memory`, which begins at a page, by one call; return False if it has them.

    Only the last page is looked at. Other threads may use the memory: no byte changes. The first
    access makes the pages where the kernel does not (before Linux 5.14). Raises OSError (ENOMEM).
    """
    address = memory.ctypes.data
    if not len(memory) or linux.has_page(address + len(memory) - 1):
        return False
    try:
        linux.populate(address, len(memory))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return True
