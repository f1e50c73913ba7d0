"""faulted_ahead: makes the pages of new memory while a read fills the memory before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.image import Bytes, FileImage

__all__ = ["LEAD_BYTES", "faulted_ahead"]

LEAD_BYTES = 64 * MIB
"""The distance between the read and the pages made: more than a writer has in flight."""

_STRETCH = 8 * MIB


@contextmanager
def faulted_ahead(image: FileImage, start: int, stop: int) -> Iterator[None]:
    """Make missing pages of the memory of [start, stop) while the body reads these bytes.

    A read into memory without pages spends half of its time on making them, in the thread that
    submits. Here another thread makes them ahead of the read, and skips those that the read has
    reached already. The pages are huge, unless the host of a virtual machine must find huge pages
    first (docs/decisions/0033). No byte changes: memory with pages keeps them. If no pages can be
    made or no thread can be started, the read makes the pages, or fails.
    """
    if stop - start <= LEAD_BYTES:
        yield
        return
    ahead = _Ahead(image, start, stop)
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
    """Makes the whole huge pages in the host memory of a range of an image, in file order."""

    def __init__(self, image: FileImage, start: int, stop: int) -> None:
        self._image, self._start, self._stop = image, start, stop
        self._huge = not host_takes_free_memory()
        self._advised: list[tuple[int, int]] = []
        self.stopped = False

    def run(self) -> None:
        due = self._start + LEAD_BYTES
        for offset, memory in self._stretches():
            if self.stopped:
                return
            if offset < due:
                continue
            address, length = memory.ctypes.data, len(memory)
            try:
                if linux.has_page(address + length - 1):
                    due = offset + LEAD_BYTES
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
        """Yield the offset in the image and the memory of whole huge pages, a few at a time."""
        for offset, memory in self._image.parts():
            if not isinstance(memory, np.ndarray) or len(memory) < HUGE_PAGE:  # or on a device
                continue
            begin = max(self._start - offset, 0)
            end = min(self._stop - offset, len(memory))
            base = memory.ctypes.data
            first = begin + -(base + begin) % HUGE_PAGE
            last = end - (base + end) % HUGE_PAGE
            for at in range(first, last, _STRETCH):
                yield offset + at, memory[at : min(at + _STRETCH, last)]
