"""Slot: page-aligned host memory for one snapshot. SlotPool: the slots of a Checkpointer."""

from __future__ import annotations

import errno
import weakref
from collections import deque

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
    """Memory for one snapshot, in the layout of the file.

    An address and its file offset are equal modulo the page size and more. So direct writers write
    this memory without a staging copy.
    """

    def __init__(self) -> None:
        self._pinned: Pinned | None = None
        self.memory: Bytes = np.empty(0, dtype=np.uint8)

    def hold(self, size_bytes: int, *, pinned: bool) -> None:
        """Provide at least `size_bytes`. When the memory grows, its contents are lost."""
        if len(self.memory) < size_bytes:
            self.free()
            self.memory = _map(size_bytes)
        if pinned and self._pinned is None:
            self._pinned = Pinned(self.memory)

    def free(self) -> None:
        """Free the memory."""
        if self._pinned:
            self._pinned.release()
        self._pinned = None
        self.memory = np.empty(0, dtype=np.uint8)  # not memory[:0]: a view keeps its base alive

    def __del__(self) -> None:
        if self._pinned:  # CUDA must not keep an address that is unmapped
            self._pinned.release()


class SlotPool:
    """`count` slots of one size, allocated together at the first save.

    `budget_bytes` limits their sum. With None, the available memory is the limit, including the
    limits of this process's control groups. The caller takes no more than `count` slots.

    There is no lock: a signal handler that saves may run inside `take`. `deque.popleft` and
    `append` are atomic under the GIL. A slot that Ctrl-C loses between them is collected, and
    `take` makes another one.
    """

    def __init__(self, count: int, budget_bytes: int | None = None) -> None:
        self.count = count
        self._free = deque(Slot() for _ in range(count))
        self._slots = weakref.WeakSet(self._free)
        self._budget_bytes = budget_bytes
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(len(slot.memory) for slot in self._slots)

    def grow(self, size_bytes: int, *, pinned: bool) -> None:
        """Set the size of every slot to at least `size_bytes`. Allocate the free slots if it grew.

        Raises StateError when the budget or the memory does not allow it.
        """
        size = _whole_pages(size_bytes)
        if size <= self._size:
            return
        count, needed = self.count, size * self.count
        needs = f"the state is {format_size(size_bytes)}: {count} slots need {format_size(needed)}"
        if self._budget_bytes is not None and needed > self._budget_bytes:
            raise StateError(
                f"{needs} of host memory, the budget is {format_size(self._budget_bytes)}; use "
                "fewer slots, a larger budget, or save() in place of save_async()"
            )
        available = available_bytes()
        if available is not None and needed - self.size_bytes > available:
            raise StateError(
                f"{needs} of host memory, {format_size(available)} are available; use fewer "
                "slots, or save() in place of save_async()"
            )
        self._size = size
        for _ in range(len(self._free)):  # one after the other, as a give appends
            self.give(self.take(pinned=pinned))

    def take(self, *, pinned: bool) -> Slot:
        """Return a free slot of the full size; its content is undefined."""
        try:
            slot = self._free.popleft()
        except IndexError:
            self._slots.add(slot := Slot())
        slot.hold(self._size, pinned=pinned)
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot to the pool."""
        self._free.append(slot)

    def free(self) -> None:
        """Free the memory of the free slots."""
        for slot in tuple(self._free):
            slot.free()


def _whole_pages(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // linux.PAGE) * linux.PAGE


def _map(size_bytes: int) -> Bytes:
    """Return memory that begins at a huge page, with all its pages populated."""
    room = fresh_pages(size_bytes, huge=True)
    try:
        linux.populate(room.ctypes.data, len(room))
    except OSError as error:
        if error.errno != errno.EINVAL:  # MADV_POPULATE_WRITE needs Linux 5.14
            raise
        room[:: linux.PAGE] = 0
    return room
