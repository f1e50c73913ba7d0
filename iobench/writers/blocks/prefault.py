"""Fresh memory gets its pages while a read fills what lies before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from iobench import linux
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.image import FileImage

__all__ = ["LEAD_BYTES", "faulted_ahead"]

LEAD_BYTES = 64 * MIB
"""How far before the read pages are made: more than a writer has in flight."""

_STRETCH = 8 * MIB
_RETRY = 64 * MIB  # of small pages, until a huge one is tried again


@contextmanager
def faulted_ahead(image: FileImage, start: int, stop: int) -> Iterator[None]:
    """While the body reads bytes [start, stop) of `image`, make the pages that they still lack.

    A read into memory without pages spends half of its time on making them, in the thread that
    submits. Here another thread makes them, a distance ahead; where the read is there already, it
    leaps over that. Pages are huge ones as long as these cost less per byte than small ones do,
    which is measured all the time (docs/decisions/0033). No byte is touched: memory that has pages
    keeps them, and its bytes. Where pages cannot be made, or no thread can be started, the read
    makes them, or fails.
    """
    if stop - start <= LEAD_BYTES:
        yield
        return
    ahead = _Ahead(image, start, stop)
    thread = Worker(target=ahead.run, name="iobench-fault-ahead", daemon=True)
    with suppress(RuntimeError):  # no more threads here: the read is not to fail for that
        thread.start()
    try:
        yield
    finally:
        ahead.stopped = True
        if thread.ident is not None:
            uninterrupted(thread.join)
        ahead.even_out()


class _Ahead:
    """Goes over the whole huge pages of a range of an image's host memory, in file order."""

    def __init__(self, image: FileImage, start: int, stop: int) -> None:
        self._image, self._start, self._stop = image, start, stop
        self._pages = _Pages()
        self._advised: list[tuple[int, int]] = []
        self.stopped = False

    def run(self) -> None:
        due = self._start + LEAD_BYTES
        for offset, address, length in self._stretches():
            if self.stopped:
                return
            if offset < due:
                continue
            try:
                if linux.has_page(address + length - 1):
                    due = offset + LEAD_BYTES
                else:
                    self._advised.append((address, length))
                    self._pages.make(address, length)
            except OSError:  # an older kernel, or no memory: the read is to tell
                return

    def even_out(self) -> None:
        """The same advice for all that was given one, so that the kernel can join the parts."""
        for address, length in self._advised:
            linux.advise_huge(address, length, huge=True)

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the image, address, length) of whole huge pages, a few at a time."""
        for segment in self._image.segments:
            if not isinstance(segment.memory, np.ndarray):  # on a device
                continue
            begin = max(self._start - segment.offset, 0)
            end = min(self._stop - segment.offset, segment.length)
            base = segment.memory.ctypes.data
            first = base + begin + -(base + begin) % HUGE_PAGE
            last = (base + end) // HUGE_PAGE * HUGE_PAGE
            for address in range(first, last, _STRETCH):
                yield segment.offset + address - base, address, min(_STRETCH, last - address)


class _Pages:
    """Makes pages, huge or small, whichever cost less per byte the last time.

    Huge ones take a fifth of the time of small ones, unless the kernel or the host of a virtual
    machine has to find them first: then it is five times as much.
    """

    def __init__(self) -> None:
        self._small_cost: float | None = None
        self._huge = False
        self._small_since = _RETRY  # bytes

    def make(self, address: int, length: int) -> None:
        """Both are multiples of HUGE_PAGE. Raises OSError."""
        if self._small_cost is None:
            address, length = self._one(address, length, huge=False)
        if not self._huge and self._small_since >= _RETRY and length:
            address, length = self._one(address, length, huge=True)
            self._small_since = 0
        if length:
            self._made(address, length, huge=self._huge)

    def _one(self, address: int, length: int, *, huge: bool) -> tuple[int, int]:
        """As much as one huge page; what is left."""
        self._made(address, HUGE_PAGE, huge=huge)
        return address + HUGE_PAGE, length - HUGE_PAGE

    def _made(self, address: int, length: int, *, huge: bool) -> None:
        linux.advise_huge(address, length, huge=huge)
        began = time.perf_counter()
        linux.populate(address, length)
        cost = (time.perf_counter() - began) / length
        if huge:
            assert self._small_cost is not None
            self._huge = cost < self._small_cost
        else:
            self._small_cost = cost
            self._small_since += length
