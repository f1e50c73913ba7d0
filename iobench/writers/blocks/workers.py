"""run_workers: threads that share the blocks of one range of a file. BlockPool: their memory.

faulted_ahead: makes the pages of new memory while a read fills the memory before them.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.blocks.pages import HUGE_PAGE, fresh_pages
from iobench.writers.image import Bytes, FileImage, Ranges
from iobench.writers.transfer import Meter

LEAD_BYTES = 64 * MIB
"""The distance between the read and the pages made: more than a writer has in flight."""

_STRETCH = 8 * MIB


@contextmanager
def faulted_ahead(reads: Sequence[tuple[FileImage, Ranges]]) -> Iterator[None]:
    """Make missing pages of the memory of `reads` while the body reads these bytes in order.

    A read into memory without pages spends half of its time on making them, in the thread that
    submits. Here another thread makes them ahead of the read, and skips those that the read has
    reached already. The pages are huge, unless the host of a virtual machine must find huge pages
    first (docs/decisions/0033). No byte changes: memory with pages keeps them. If no pages can be
    made or no thread can be started, the read makes the pages, or fails.
    """
    if sum(stop - start for _, ranges in reads for start, stop in ranges) <= LEAD_BYTES:
        yield
        return
    ahead = _Ahead(reads)
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
    """Makes whole pages in the host memory of some ranges of images, in file order."""

    def __init__(self, reads: Sequence[tuple[FileImage, Ranges]]) -> None:
        self._reads = reads
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
        read = 0
        for image, ranges in self._reads:
            for memory in itertools.chain.from_iterable(image.room(*one) for one in ranges):
                if isinstance(memory, np.ndarray) and len(memory) >= HUGE_PAGE:  # not on a device
                    base = memory.ctypes.data
                    last = len(memory) - (base + len(memory)) % self._page
                    for at in range(-base % self._page, last, _STRETCH):
                        yield read + at, memory[at : min(at + _STRETCH, last)]
                read += len(memory)


_T = TypeVar("_T")
_R = TypeVar("_R")


class Blocks:
    """Iterates over the `count` blocks (start, stop) of some ranges. Threads share one iteration.

    The first block of a range begins where the range does, and all others begin at multiples of
    `unit`, of which `block_size` is a multiple.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], block_size: int, unit: int = 1) -> None:
        self._block_size = block_size
        self._ranges = [
            (start, stop, start - start % unit) for start, stop in ranges if start < stop
        ]
        counts = [-(-(stop - first) // block_size) for _, stop, first in self._ranges]
        self._before = [0, *itertools.accumulate(counts)]
        """Blocks before each range."""
        self.count = self._before[-1]
        self._left = iter(range(self.count))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # One step of a range iterator is atomic under the GIL: it needs no lock. A step of `chain`
        # or `zip` is not: it makes an iterator, and then the garbage collector may run, whose
        # finalizers let other threads in between the begin and the end of a block.
        while (number := next(self._left, None)) is not None:
            at = bisect.bisect_right(self._before, number) - 1
            start, stop, first = self._ranges[at]
            begin = first + (number - self._before[at]) * self._block_size
            yield max(begin, start), min(begin + self._block_size, stop)

    def cancel(self) -> None:
        """Yield no more blocks."""
        self._left = iter(range(0))


def run_workers(
    threads: int,
    blocks: Blocks,
    work: Callable[[Blocks, Meter], None],
    meter: Meter,
    *,
    caller_waits: bool = False,
) -> None:
    """Run `work(blocks, own_meter)` in `threads` workers, or fewer if there are fewer blocks.

    The calling thread is one of them. With `caller_waits` it only waits, so that no signal handler
    runs inside `work`. If the interpreter ends and refuses new threads, it does all the work.

    Returns when all workers have ended. The first failure, or KeyboardInterrupt in this thread,
    cancels the remaining blocks. It is raised when all workers have ended; further failures are
    added to it as notes.
    """
    meters = [Meter() for _ in range(min(threads, blocks.count))]
    if not meters:
        return
    failures: list[BaseException] = []
    began_s = time.perf_counter()

    def run(own: Meter) -> None:
        try:
            work(blocks, own)
        except BaseException as error:  # noqa: BLE001 -- raised again below, in the caller's thread
            failures.append(error)
            blocks.cancel()

    helpers = [
        Worker(target=run, args=(own,), name="iobench-worker")
        for own in (meters if caller_waits else meters[1:])
    ]
    try:
        started = []
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError as error:
                if "interpreter shutdown" not in str(error):
                    raise
                break
            started.append(helper)
        if caller_waits and started:
            for helper in started:
                helper.join()
        else:
            run(meters[0])
    except BaseException:  # a thread could not be started, or a handler raised in a wait
        blocks.cancel()
        raise
    finally:
        for helper in helpers:
            while helper.is_alive():  # they use the descriptor and the memory
                try:
                    helper.join()
                except BaseException as error:  # noqa: BLE001 -- Ctrl-C, or SystemExit of a handler
                    failures.append(error)
                    blocks.cancel()
    if failures:
        failures.sort(key=lambda error: isinstance(error, Exception))  # an interrupt comes first
        for other in failures[1:]:
            failures[0].add_note(f"another worker failed too: {other!r}")
        raise failures[0]
    meter.absorb(meters, time.perf_counter() - began_s)


def map_in_workers(
    threads: int, call: Callable[[_T], _R], items: Sequence[_T], *, caller_waits: bool = False
) -> list[_R]:
    """Return `call(item)` for each of `items`, in their order; see `run_workers`."""
    results: dict[int, _R] = {}

    def work(numbers: Blocks, _: Meter) -> None:
        for number, _end in numbers:
            results[number] = call(items[number])

    numbers = Blocks([(0, len(items))], 1)
    run_workers(threads, numbers, work, Meter(), caller_waits=caller_waits)
    return [results[number] for number in range(len(items))]


class BlockPool:
    """Aligned blocks of one size. They are kept for the next transfer, which saves page faults.

    Blocks are parts of huge pages where the kernel provides them. A device accepts a limited number
    of memory segments per request (254 on virtio). With scattered 4 KiB pages that is less than
    1 MiB, with huge pages the device's full request size (docs/decisions/0004 and 0010).

    Several operations at once take more blocks than one: those above `keep` are freed when they are
    given back.

    There is no lock: inside `take` the garbage collector may run the finalizer of a stream, which
    calls `give`. `list.pop` and `list.append` are atomic under the GIL.
    """

    def __init__(self, block_size: int, keep: int | None = None) -> None:
        """`keep`: the blocks that a single operation needs; None keeps all."""
        self.block_size, self._keep = block_size, keep
        self._free: list[Bytes] = []

    def take(self) -> Bytes:
        """Return a block; its content is undefined."""
        try:
            return self._free.pop()
        except IndexError:
            *others, block = self._make()
            self._free.extend(others)
            return block

    def _make(self) -> list[Bytes]:
        """Make as many blocks as one huge page holds, or one block of several huge pages."""
        size = max(1, HUGE_PAGE // self.block_size) * self.block_size
        room = fresh_pages(size + -size % HUGE_PAGE, huge=True)
        starts = range(0, size, self.block_size)
        return [room[start : start + self.block_size] for start in reversed(starts)]

    def give(self, block: Bytes) -> None:
        """Return a block to the pool."""
        if self._keep is None or len(self._free) < self._keep:
            self._free.append(block)

    @contextmanager
    def block(self) -> Iterator[Bytes]:
        """Provide a block for the duration of a `with`."""
        block = self.take()
        try:
            yield block
        finally:
            self.give(block)
