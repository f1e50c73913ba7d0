"""read_ahead: ranges of stored files, read by threads while the caller uses the ones before."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from iobench import linux
from iobench.errors import DataMismatchError, TransferError
from iobench.formats.many_parts import WindowImage
from iobench.formats.tensor_slices import GAP_BYTES
from iobench.writers.base import Writer
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes
from iobench.writers.transfer import Transfer

_HUGE = partial(fresh_pages, huge=True)


class FileRange(NamedTuple):
    """The bytes [start, stop) of the file `path`, and what the caller wants of them."""

    path: str
    start: int
    stop: int
    wanted: Any = None


def joined(
    ranges: Iterable[FileRange], sizes: Mapping[str, int], at_once: int
) -> Iterator[FileRange]:
    """Yield ranges of whole pages; `wanted` are those of `ranges`, in order, that each one has.

    Those with gaps of less than 1 MiB are read together, up to `at_once` bytes or one larger range.
    """
    held: list[FileRange] = []
    stop = 0

    def whole() -> FileRange:
        path, start = held[0].path, held[0].start
        end = min(-(-stop // linux.PAGE) * linux.PAGE, sizes[path])
        return FileRange(path, start - start % linux.PAGE, end, held)

    for one in ranges:
        if held:
            begin = held[0].start
            near = one.path == held[0].path and begin <= one.start < stop + GAP_BYTES
            if not near or max(stop, one.stop) - begin > at_once:
                yield whole()
                held = []
        stop = max(stop, one.stop) if held else one.stop
        held.append(one)
    if held:
        yield whole()


def read_ahead(
    writer: Writer,
    home: str,
    sizes: Mapping[str, int],
    ranges: Iterable[FileRange],
    *,
    largest_bytes: int,
    threads: int = 2,  # the device works for one while the other ends a range and begins the next
    pages: Callable[[int], Bytes] = _HUGE,
    failed: Callable[[str, DataMismatchError | TransferError], None] | None = None,
    on_read: Callable[[Transfer], None] = lambda _: None,
) -> Generator[tuple[FileRange, Bytes], None, None]:
    """Yield each of `ranges` and its bytes, in order, while `threads` read the next ones.

    `sizes` are those of the files in `home`. Each range begins at a page and has at most
    `largest_bytes`; twice as many as threads are in memory, which `pages` makes and which is used
    again. The bytes stay until the next
    range is taken. What a read raises is raised here, or goes to `failed` with the path, in another
    thread; `on_read` gets its Transfer there. Close the generator if not all is taken.
    """
    spare = [pages(largest_bytes) for _ in range(2 * threads)]

    def fetch(window: _Window) -> None:
        one, memory = window
        try:
            image = WindowImage(one.path, sizes[one.path], one.start, memory)
            on_read(writer.read(image, home, start=one.start, stop=one.stop))
        except (DataMismatchError, TransferError) as error:
            if failed is None:
                raise
            failed(one.path, error)

    reader: Channel[_Window] = Channel(
        lambda: reader.serve(fetch), name="iobench-ahead", workers=threads, limit=2 * threads
    )
    waiting: deque[Lease[_Window]] = deque()
    try:
        for one in itertools.chain(ranges, [None]):
            while waiting and (not spare or one is None):
                lease = waiting.popleft()
                reader.wait(lease)
                found, memory = lease.item
                yield found, memory[: found.stop - found.start]
                spare.append(memory)
            if one is not None:
                waiting.append(Lease((one, spare.pop())))
                reader.submit(waiting[-1])
    finally:
        reader.close(drop=True)


_Window = tuple[FileRange, Bytes]
