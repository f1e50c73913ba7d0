"""Slot: page-aligned host memory for one snapshot. SlotPool: the slots of a Checkpointer."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TypeVar

import numpy as np
import torch

from iobench import linux
from iobench.checkpoint.save import Save
from iobench.environment.memory import available_bytes
from iobench.errors import StateError, UnavailableError
from iobench.units import format_size
from iobench.writers.blocks.pages import HUGE_PAGE, fresh_pages, make_pages
from iobench.writers.device.cuda import Device, cuda_device
from iobench.writers.image import Bytes

SlotT = TypeVar("SlotT", bound="Slot")

_REMEDY = "use fewer slots, or save() in place of save_async()"


class Slot:
    """Memory for one snapshot, in the layout of the file. The copy into it makes its pages.

    An address and its file offset are equal modulo the page size and more. So direct writers write
    this memory without a staging copy. When pinned memory is freed, it is unpinned. Nothing is
    copied to the bytes before `begin`, a page, so they take no memory.
    """

    def __init__(self) -> None:
        self.memory: Bytes = np.empty(0, dtype=np.uint8)
        self._held: Bytes = self.memory
        """What is pinned: the bytes from `begin` on, as an array that is no view of `memory`."""
        self.begin = 0

    @property
    def held_bytes(self) -> int:
        """The memory that it takes."""
        return max(0, len(self.memory) - self.begin)

    def hold(self, size_bytes: int, *, pinned: bool) -> None:
        """Provide at least `size_bytes`. When the memory grows, its contents are lost.

        With `pinned` it is pinned for the CUDA device of the calling thread.
        """
        if len(self.memory) < size_bytes:
            self.free()
            self._use(fresh_pages(size_bytes, huge=True))
        if pinned:
            _pin(self._held, cuda_device(torch.device("cuda")))

    def _use(self, memory: Bytes) -> None:
        address, length = memory.ctypes.data + self.begin, len(memory) - self.begin
        self.memory = memory
        self._held = np.asarray(linux.MemorySpan(address, length, memory))

    def make_ready(self, device: Device | None = None) -> None:
        """Make the pages of the memory, in any thread, until it is freed. Raises OSError (ENOMEM).

        With a device it is then pinned for it. That raises UnavailableError.
        """
        memory, held = self.memory, self._held
        # Small steps: the kernel holds the lock of the address space in each, and this thread may
        # have a low priority.
        for start in range(self.begin, len(memory), HUGE_PAGE):
            if self.memory is not memory:
                return
            make_pages(memory[start : start + HUGE_PAGE])
        if device is not None and len(held):
            _pin(held, device)

    def free(self) -> None:
        """Free the memory."""
        # Not memory[:0]: a view keeps its base alive.
        self.memory = self._held = np.empty(0, dtype=np.uint8)


def _pin(memory: Bytes, device: Device) -> None:
    if (reason := device.pin(memory)) is not None:
        raise UnavailableError(
            "pinned memory",
            f"{reason}.",
            "Use fewer slots, or raise the limit of locked memory (ulimit -l).",
        )


class SlotPool:
    """`count` slots of one size, each allocated when a save needs it.

    `budget_bytes` limits their sum. With None, the available memory is the limit, including the
    limits of this process's control groups. The caller takes no more than `count` slots. With
    `streams`, a smaller budget means fewer slots. If it does not even hold one snapshot, there is
    one slot for the end of the file: a Streamed has the rest. With `whole` that raises StateError.

    There is no lock: a signal handler that saves may run inside `take`. `deque.popleft` and
    `append` are atomic under the GIL. A slot that Ctrl-C loses between them is collected, and
    `take` makes another one.
    """

    counts_alone = True
    """Whether `count` is the same in all ranks of a job without their agreement."""

    def __init__(
        self,
        count: int,
        budget_bytes: int | None = None,
        *,
        streams: bool = False,
        whole: bool = False,
        alone: bool = True,
    ) -> None:
        """With `alone`, `grow` counts the slots; otherwise `count` stays until it is set."""
        self.count = self._most = count
        # Not a WeakSet, which cannot be read while a signal handler or another thread adds to it.
        self._made = list[weakref.ref[Slot]]()
        self._free = deque(self._noted(Slot()) for _ in range(count))
        self._budget_bytes = budget_bytes
        self._streams = streams and budget_bytes is not None
        self._whole = whole or not streams
        self.counts_alone = alone or not self._streams
        self._size = self._begin = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(slot.held_bytes for slot in self._existing())

    def _noted(self, slot: SlotT) -> SlotT:
        """Return a new slot, which `_existing` returns until it is collected."""
        self._made.append(weakref.ref(slot, self._made.remove))
        return slot

    def _existing(self) -> list[Slot]:
        """Return the slots that were made and not collected, in this order."""
        return [slot for made in list(self._made) if (slot := made()) is not None]

    def grow(self, size_bytes: int) -> None:
        """Set the size of every slot to at least `size_bytes`.

        Raises StateError when the budget or the memory does not allow it for all slots.
        """
        count = self.counted(size_bytes)
        if self.counts_alone:
            self.count = count

    def _layout(self, size_bytes: int) -> tuple[int, int, int]:
        """Return the number of slots for a snapshot, their size, and the first byte in memory."""
        size, count = _whole_pages(size_bytes), self._most
        if not self._begin:
            size = max(size, self._size)
        room = _whole_pages(self._budget_bytes or 0)
        if not self._streams or size * count <= room:
            return count, size, 0
        return max(1, room // size), size, 0 if self._whole else max(0, size - room)

    def counted(self, size_bytes: int) -> int:
        """Return how many slots of `size_bytes` there are or could be. Raises what `grow` does."""
        count, size, begin = self._layout(size_bytes)
        if (size, begin) == (self._size, self._begin):
            return count
        needed, budget = (size - begin) * count, self._budget_bytes
        needs = f"the state is {format_size(size_bytes)}: {count} slots need {format_size(needed)}"
        if self._whole and budget is not None and needed > _whole_pages(budget):
            raise StateError(
                f"{needs} of host memory, the budget is {format_size(budget)}; use "
                "fewer slots, a larger budget, or save() in place of save_async()"
            )
        available = available_bytes()
        if available is not None and needed - self.size_bytes > available:
            raise StateError(
                f"{needs} of host memory, {format_size(available)} are available; {_REMEDY}"
            )
        self._size, self._begin = size, begin
        return count

    def allocated(self) -> list[Slot]:
        """Allocate the free slots, and return them. They stay free; see `Slot.make_ready`."""
        slots: list[Slot] = []
        for _ in range(min(len(self._free), self.count)):
            slots.append(slot := self.take(pinned=False))
            self._free.appendleft(slot)  # one after the other: `take` pops on the right
        return slots

    @property
    def frees_more(self) -> bool:
        """Whether memory for one more slot can come from slots that are given back."""
        return False  # the caller has one of `count` then

    def grows(self, size_bytes: int) -> bool:
        """Return whether slots of this size need other memory than those that there are."""
        return self._size > 0 and self._layout(size_bytes)[1:] != (self._size, self._begin)

    def take(self, *, pinned: bool, save: Save | None = None) -> Slot:
        """Return a free slot of the full size, the last one used; its content is undefined.

        Raises StateError when there is no memory left for one more slot.
        """
        del save  # a slot in a memory tier shows whose it is
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._noted(Slot())
        try:
            self.fit(slot, pinned=pinned)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def fit(self, slot: Slot, *, pinned: bool) -> None:
        """Give a slot that was taken its full size. Its contents are lost if it grows.

        Raises StateError: the memory that was available for all may be in use by now.
        """
        if slot.begin != self._begin:
            slot.free()
            slot.begin = self._begin
        needed = self._size - self._begin - slot.held_bytes
        if self._streams and self.size_bytes + needed > _whole_pages(self._budget_bytes or 0):
            self.free()  # the others have the memory of an earlier size
        available = available_bytes() if needed > 0 else None
        if available is not None and needed > available:
            raise StateError(
                f"one more slot needs {format_size(needed)} of host memory, "
                f"{format_size(available)} are available; {_REMEDY}"
            )
        slot.hold(self._size, pinned=pinned)

    def give(self, slot: Slot) -> None:
        """Return a slot to the pool."""
        self._free.append(slot)

    def free(self) -> None:
        """Free the memory of the free slots. More can be taken afterwards."""
        for slot in list(self._free):
            slot.free()


def _whole_pages(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // linux.PAGE) * linux.PAGE
