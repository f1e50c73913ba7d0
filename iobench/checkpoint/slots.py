"""Slot: page-aligned host memory that holds one snapshot. SlotPool: the few that are reused."""

from __future__ import annotations

import errno

import numpy as np

from iobench import linux
from iobench.checkpoint.pinning import Pinned
from iobench.environment.memory import available_bytes
from iobench.errors import StateError
from iobench.units import format_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes

__all__ = ["Slot", "SlotPool"]


class Slot:
    """Memory for one snapshot, laid out as the file will be.

    Its addresses are congruent with the file's offsets, modulo pages and more, so that direct
    writers take it as it lies and stage nothing.
    """

    def __init__(self) -> None:
        self.memory: Bytes = np.empty(0, dtype=np.uint8)
        self._pinned: Pinned | None = None

    def hold(self, size_bytes: int, *, pinned: bool) -> None:
        """Have room for `size_bytes` at least; what was in it is lost when it has to grow."""
        if len(self.memory) < size_bytes:
            self.free()
            self.memory = _map(size_bytes)
        if pinned and self._pinned is None:
            self._pinned = Pinned(self.memory)

    def free(self) -> None:
        """Give the memory back."""
        if self._pinned:
            self._pinned.release()
        self._pinned = None
        self.memory = np.empty(0, dtype=np.uint8)  # a view of it would hold it


class SlotPool:
    """`count` slots of one size, taken from the machine all together at the first save.

    `budget_bytes` bounds their sum; None leaves it to the memory that is available, in the
    control groups of this process too.
    """

    def __init__(self, count: int, budget_bytes: int | None = None) -> None:
        self.slots = [Slot() for _ in range(count)]
        self._budget_bytes = budget_bytes
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Of all slots together."""
        return sum(len(slot.memory) for slot in self.slots)

    def grow(self, size_bytes: int) -> bool:
        """Let every slot have `size_bytes` from now on; whether that is more than before.

        Raises StateError when they cannot have it; before anything is copied or taken.
        """
        size = _whole_pages(size_bytes)
        if size <= self._size:
            return False
        count, needed = len(self.slots), size * len(self.slots)
        told = f"the state is {format_size(size_bytes)}: {count} slots need {format_size(needed)}"
        if self._budget_bytes is not None and needed > self._budget_bytes:
            raise StateError(
                f"{told} of host memory, the budget is {format_size(self._budget_bytes)}; use "
                "fewer slots, a larger budget, or save() in place of save_async()"
            )
        available = available_bytes()
        if available is not None and needed - self.size_bytes > available:
            raise StateError(
                f"{told} of host memory, {format_size(available)} are available; use fewer "
                "slots, or save() in place of save_async()"
            )
        self._size = size
        return True

    def ready(self, slot: Slot, *, pinned: bool) -> None:
        """Give `slot`, which is free, its full size."""
        slot.hold(self._size, pinned=pinned)

    def free(self) -> None:
        """Give all memory back."""
        for slot in self.slots:
            slot.free()


def _whole_pages(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // linux.PAGE) * linux.PAGE


def _map(size_bytes: int) -> Bytes:
    """Memory that begins at a huge page and has all its pages already."""
    room = fresh_pages(size_bytes, huge=True)
    try:
        linux.populate(room.ctypes.data, len(room))
    except OSError as error:
        if error.errno != errno.EINVAL:  # older kernels do not know how
            raise
        room[:: linux.PAGE] = 0
    return room
