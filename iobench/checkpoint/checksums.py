"""Checksums of a file, one per piece: computed while it is written, compared while it is read."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import xxhash

from iobench.checkpoint.content import StreamedImage
from iobench.checkpoint.manifest import FileRecord, Piece, Pieces
from iobench.errors import DataMismatchError
from iobench.formats.collector import collector_paused
from iobench.units import KIB, MIB
from iobench.writers.base import CopyReader
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.device.staging import staged
from iobench.writers.image import Bytes, FileImage, WatchedImage, WrappedImage
from iobench.writers.transfer import Meter, Transfer

_RUN = MIB  # of small pieces: few calls of Python, and other threads do not wait long for the GIL
_EMPTY = np.empty(0, dtype=np.uint8)


def record_of(image: FileImage, pieces: Sequence[tuple[str, int]]) -> FileRecord:
    """Return the record of the file `image`, whose `pieces` are (name, bytes) each."""
    digests = PieceDigests(image, Pieces(pieces))
    digests.compute()
    return digests.record()


class PieceDigests:
    """XXH3-64 of each piece of `image`. Several threads may compute them."""

    def __init__(self, image: FileImage, pieces: Pieces) -> None:
        self._image, self._pieces = image, pieces
        self.found = [""] * len(pieces)
        """The checksums of all pieces, in hex; "" where it was not computed."""

    def compute(self, *, above: int = -1, before: int | None = None) -> None:
        """Compute what was not computed yet, of the pieces of more than `above` bytes.

        With `before`, of those that begin before this byte.
        """
        pieces, found = self._pieces, self.found
        if pieces.largest_bytes <= above:
            return
        last = None if before is None else bisect.bisect_left(pieces.begins, before)
        due = [at for at in self._missing(last) if pieces.sizes[at] > above]
        for first, last in self._runs(due):
            sizes = pieces.sizes[first:last]
            found[first:last] = _digests_of(self._image, pieces.begins[first], sizes)

    def compute_in(self, start: int, stop: int, block: Bytes) -> None:
        """Compute the pieces that are whole in the bytes [start, stop), of which `block` is a copy.

        The copy is in the cache of the processor. Other pieces are left to `compute`.
        """
        begins, ends, found = self._pieces.begins, self._pieces.ends, self.found
        first = bisect.bisect_left(begins, start)
        last = bisect.bisect_right(ends, stop, lo=first)
        if first >= last:
            return
        memory, digest = block.data, xxhash.xxh3_64_hexdigest
        found[first:last] = [
            old or digest(memory[begin - start : end - start])
            for old, begin, end in zip(
                found[first:last], begins[first:last], ends[first:last], strict=True
            )
        ]

    def record(self) -> FileRecord:
        """Return the record of the file, after `compute`."""
        with collector_paused():
            listed = tuple(map(Piece, self._pieces.names, self._pieces.sizes, self.found))
        return FileRecord(path=self._image.path, size_bytes=self._image.size_bytes, pieces=listed)

    def _missing(self, last: int | None) -> Iterator[int]:
        """Yield the numbers of the pieces without a checksum: few among many, as a rule."""
        with suppress(ValueError):  # no more of them
            at, last = -1, len(self.found) if last is None else last
            while True:
                at = self.found.index("", at + 1, last)
                yield at

    def _runs(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of consecutive pieces: one large piece, or up to `_RUN` bytes."""
        if not numbers:
            return
        begins, ends = self._pieces.begins, self._pieces.ends
        first = last = numbers[0]
        for number in numbers:
            if number > last or (number > first and ends[number] - begins[first] > _RUN):
                yield first, last
                first = number
            last = number + 1
        yield first, last


def _digests_of(image: FileImage, begin: int, sizes: list[int]) -> list[str]:
    stop = begin + sum(sizes)
    if len(sizes) == 1:
        state = xxhash.xxh3_64()
        for view in image.host_bytes(begin, stop):
            state.update(view.data)
        return [state.hexdigest()]
    if image.on_device:  # through blocks that are used again
        views = [view.copy() for view in image.host_bytes(begin, stop)]
    else:
        views = image.views(begin, stop)
    if list(map(len, views)) != sizes:  # one segment holds several pieces, or a piece is empty
        run = views[0] if len(views) == 1 else np.concatenate([_EMPTY, *views])
        ends = [0, *itertools.accumulate(sizes)]
        views = [run[start:stop] for start, stop in itertools.pairwise(ends)]
    return [xxhash.xxh3_64_hexdigest(view.data) for view in views]


_SMALL = 64 * KIB
"""The largest piece that is left to the copies of the writer."""


@contextmanager
def recorded(
    image: FileImage, pieces: Pieces, *, by_block: bool
) -> Iterator[tuple[FileImage, PieceDigests]]:
    """Compute the checksums of `image` while the body writes the image that is yielded with them.

    A thread computes them: it reads the image's memory, and it has ended after the body, also after
    Ctrl-C. With `by_block`, for a writer that copies to blocks, it leaves small pieces to these
    copies: many short computations in another thread would hold Python's lock, and the writer would
    wait for it at every copy (docs/decisions/0040). If the writer takes the memory itself, because
    direct I/O is refused, the thread computes them all. Raises what the thread raised.

    Of a StreamedImage the thread computes all of them, and raises why the save fails. Memory of a
    device is copied for the checksums, apart from the copies of the writer.
    """
    streamed = image if isinstance(image, StreamedImage) else None
    at_once = streamed is not None or image.on_device or image.in_one_piece(0, image.size_bytes)
    by_block = by_block and not at_once
    # A channel is a reference cycle with its function, so that must not hold the image's memory.
    channel: Channel[Callable[[], None]] = Channel(
        lambda: channel.serve(lambda compute: compute()), name="iobench-checksums", limit=2
    )
    with staged(image, Meter()) as on_host:
        digests = PieceDigests(on_host, pieces)

        def compute() -> None:
            if streamed is not None:
                digests.compute(before=streamed.begin)
                streamed.hashed()
            digests.compute(above=_SMALL if by_block else -1)

        all_of_them = functools.cache(lambda: channel.submit(Lease(digests.compute)))
        sent = _RecordedImage(image, _digests=digests, _compute=all_of_them) if by_block else image
        try:
            channel.submit(Lease(compute))
            yield sent, digests
            channel.drain()
            if streamed is not None:
                streamed.written()
            digests.compute()  # pieces in two blocks
        finally:
            channel.close()


class _RecordedImage(WrappedImage):
    """An image whose small pieces are hashed in the blocks to which a writer copies them."""

    _digests: PieceDigests
    _compute: Callable[[], None]

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        if stop - start > _SMALL:  # not the end of a file, which has no whole page
            self._compute()
        with super().outgoing(start, stop, meter) as views:
            yield views

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        count = self._image.gather(start, stop, block)
        self._digests.compute_in(start, stop, block)
        return count


@contextmanager
def compared(
    image: FileImage,
    record: FileRecord,
    where: object,
    read_again: Callable[[int, int, str], bool] = lambda *_: False,
) -> Iterator[FileImage]:
    """Provide `image` to be read in the body; compare every piece of it with `record`.

    After the body, `read_again` fills the range of a piece that differs from the next copy, until
    it returns False. Raises DataMismatchError with the names of the pieces that differ then.
    """
    comparison = _Comparison(image, record)
    if not sum(comparison.sizes) == image.size_bytes == record.size_bytes:
        raise DataMismatchError(
            f"{where}: has {image.size_bytes} bytes, its manifest says {record.size_bytes}"
        )
    yield WatchedImage(image, comparison.arrived)
    wrong = comparison.finish(read_again)
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise DataMismatchError(
            f"{where}: damaged, {len(wrong)} of {len(record.pieces)} checksums differ: {shown}"
        )


def read_compared(copy: CopyReader, image: FileImage, record: FileRecord) -> Transfer:
    """Fill `image` with the file of `record`; a damaged piece comes from the next copy.

    Raises DataMismatchError for damage in all copies, and TransferError.
    """
    where, again = os.path.join(copy.location, record.path), partial(copy.read_again, image)
    with compared(image, record, where, again) as incoming:
        return copy.read(incoming)


def read_file(copy: CopyReader, record: FileRecord) -> bytes:
    """Return the bytes of a small file; see `read_compared`."""
    where = os.path.join(copy.location, record.path)
    try:
        memory = np.empty(record.size_bytes, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # of a manifest that no writer has made
        raise DataMismatchError(
            f"{where}: its manifest says {record.size_bytes} bytes, which do not fit the memory"
        ) from error
    image = FileImage.of(record.path, [memory])
    read_compared(copy, image, record)
    return memory.tobytes()


class _Comparison:
    """Compares pieces in file order, in the thread that has filled the next bytes.

    XXH3 is ten times faster than a disk, and other reads are in flight during that time. A thread
    of its own would hold Python's lock for the small pieces, and the device would wait.
    """

    def __init__(self, image: FileImage, record: FileRecord) -> None:
        self._image, self._pieces = image, record.pieces
        self.sizes = [piece.size_bytes for piece in record.pieces]
        self._ends = list(itertools.accumulate(self.sizes))
        self._expected = [piece.xxh3_64 for piece in record.pieces]
        self._lock = threading.Lock()
        self._ahead: dict[int, int] = {}  # ranges that arrived before the bytes in front of them
        self._position = 0
        self._number = 0  # of the piece at `_position`
        self._part: xxhash.xxh3_64 | None = None  # of its bytes before `_position`
        self._failure: Exception | None = None
        self._wrong: set[int] = set()

    def arrived(self, start: int, stop: int) -> None:
        """Compare what is complete. Raises nothing: a writer's completion callback calls it."""
        with self._lock:
            try:
                self._ahead[start] = stop
                while (end := self._ahead.pop(self._position, 0)) > self._position:
                    self._compare_until(end)
            except Exception as error:  # noqa: BLE001 -- raised by `finish`
                self._failure = self._failure or error

    def finish(self, read_again: Callable[[int, int, str], bool]) -> list[str]:
        """Compare the rest: pieces that no call of `arrived` reported, and empty ones.

        Return the names of the pieces that differ, also after `read_again`.
        """
        if self._failure is not None:
            raise self._failure
        self._compare_until(self._image.size_bytes)
        self._take(memoryview(b""))
        names = []
        for number in sorted(self._wrong):
            piece = self._pieces[number]
            start, stop = self._ends[number] - piece.size_bytes, self._ends[number]
            name = piece.name or "the header"
            while self._differs(number, start, stop):
                if not read_again(start, stop, name):
                    names.append(name)
                    break
        return names

    def _differs(self, number: int, start: int, stop: int) -> bool:
        digest = xxhash.xxh3_64()
        for view in self._image.views(start, stop):
            digest.update(view.data)
        return digest.hexdigest() != self._expected[number]

    def _compare_until(self, stop: int) -> None:
        for view in self._image.views(self._position, stop):
            self._take(view.data)

    def _take(self, data: memoryview) -> None:
        """Compare all pieces that end in `data`, which begins at `_position`."""
        start, first, part = self._position, self._number, self._part
        self._position = stop = start + len(data)
        self._number = last = bisect.bisect_right(self._ends, stop, lo=first)
        ends = [end - start for end in self._ends[first:last]]
        digests = []
        if ends:
            if part is not None:
                part.update(data[: ends[0]])
                digests = [part.hexdigest()]
            done, digest = len(digests), xxhash.xxh3_64_hexdigest
            begins = [0, *ends]
            digests += [
                digest(data[a:b]) for a, b in zip(begins[done:-1], ends[done:], strict=True)
            ]
            part = None
        rest = data[ends[-1] if ends else 0 :]
        if len(rest):
            part = part or xxhash.xxh3_64()
            part.update(rest)
        self._part = part
        if digests != self._expected[first:last]:
            self._wrong.update(
                number
                for number, digest in enumerate(digests, first)
                if digest != self._expected[number]
            )
