"""faulted_ahead: makes the pages of new memory while a read fills the memory before them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.image import Bytes, FileImage, Ranges

LEAD_BYTES = 64 * MIB
"""The distance between the read and the pages made: more than a writer has in flight."""

_STRETCH = 8 * MIB


@contextmanager
def faulted_ahead(image: FileImage, ranges: Ranges) -> Iterator[None]:
    """Make missing pages of the memory of `ranges` while the body reads these bytes in order.

    A read into memory without pages spends half of its time on making them, in the thread that
    submits. Here another thread makes them ahead of the read, and skips those that the read has
    reached already. The pages are huge, unless the host of a virtual machine must find huge pages
    first (docs/decisions/0033). No byte changes: memory with pages keeps them. If no pages can be
    made or no thread can be started, the read makes the pages, or fails.
    """
    if sum(stop - start for start, stop in ranges) <= LEAD_BYTES:
        yield
        return
    ahead = _Ahead(image, ranges)
    thread = Worker(target=ahead.run, name="iobench-fault-ahead", daemon=True)
    with suppress(RuntimeError):  # no thread can be started; the read works without one
        thread.start()
    try:
        yield
    finally:
        ahead.stopped = True
        if thread.ident is not None:
            uninterrupted(thread.join)
        ahead.advise_all()


class _Ahead:
    """Makes whole pages in the host memory of some ranges of an image, in file order."""

    def __init__(self, image: FileImage, ranges: Ranges) -> None:
        self._image, self._ranges = image, ranges
        self._huge = not host_takes_free_memory()
        self._page = HUGE_PAGE if self._huge else linux.PAGE
        self._advised: list[tuple[int, int]] = []
        self.stopped = False

    def run(self) -> None:
        due = LEAD_BYTES
        for at, memory in self._stretches():
            if self.stopped:
                return
            if at < due:
                continue
            address, length = memory.ctypes.data, len(memory)
            try:
                if linux.has_page(address + length - 1):
                    due = at + LEAD_BYTES
                else:
                    self._advised.append((address, length))
                    linux.advise_huge(address, length, huge=self._huge)
                    linux.populate(address, length)
            except OSError:  # an older kernel, or no memory: the read reports it
                return

    def advise_all(self) -> None:
        """Give all parts the same advice, so that the kernel merges their mappings."""
        for address, length in self._advised:
            linux.advise_huge(address, length, huge=True)

    def _stretches(self) -> Iterator[tuple[int, Bytes]]:
        """Yield how much is read before it, and the memory of whole pages, a few at a time."""
        sizes = (stop - start for start, stop in self._ranges)
        before = list(itertools.accumulate(sizes, initial=0))
        for offset, memory in self._image.parts():
            if not isinstance(memory, np.ndarray) or len(memory) < HUGE_PAGE:  # or on a device
                continue
            base, length = memory.ctypes.data, len(memory)
            number = bisect.bisect_right(self._ranges, offset, key=lambda one: one[1])
            for start, stop in itertools.islice(self._ranges, number, None):
                if start >= offset + length:
                    break
                begin, end = max(start - offset, 0), min(stop - offset, length)
                first = begin + -(base + begin) % self._page
                last = end - (base + end) % self._page
                for at in range(first, last, _STRETCH):
                    due = before[number] + offset + at - start
                    yield due, memory[at : min(at + _STRETCH, last)]
                number += 1
