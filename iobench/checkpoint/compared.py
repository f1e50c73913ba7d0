"""compared: compares a file with the checksums of its manifest while a writer reads it."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import xxhash

from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["ComparedImage", "compared", "read_compared", "read_file"]


@contextmanager
def compared(image: FileImage, record: FileRecord, where: object) -> Iterator[ComparedImage]:
    """Provide `image` to be read in the body; compare every piece of it with `record`.

    Raises DataMismatchError with the names of the pieces that differ after the body.
    """
    comparison = _Comparison(image, record)
    if not comparison.size_bytes == image.size_bytes == record.size_bytes:
        raise DataMismatchError(
            f"{where}: has {image.size_bytes} bytes, its manifest says {record.size_bytes}"
        )
    yield ComparedImage(path=image.path, segments=image.segments, comparison=comparison)
    comparison.finish()
    wrong = comparison.wrong
    if wrong:
        shown = ", ".join(name for _, _, name in wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise DataMismatchError(
            f"{where}: damaged, {len(wrong)} of {len(record.pieces)} checksums differ: {shown}"
        )


def read_compared(copy: CopyReader, image: FileImage, record: FileRecord) -> Transfer:
    """Fill `image` with the file of `record`; a damaged piece comes from the next copy.

    Raises DataMismatchError for damage in all copies, and TransferError.
    """
    with compared(image, record, os.path.join(copy.location, record.path)) as incoming:
        transfer = copy.read(incoming)
        for piece in incoming.damaged():
            while piece in incoming.damaged() and copy.read_again(image, *piece):
                incoming.compare_again(*piece[:2])
    return transfer


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


@dataclass(frozen=True, kw_only=True)
class ComparedImage(FileImage):
    """An image whose pieces are compared while a writer fills it."""

    comparison: _Comparison = field(repr=False, compare=False)

    def filled(self, start: int, stop: int) -> None:
        self.comparison.arrived(start, stop)

    def damaged(self) -> list[tuple[int, int, str]]:
        """Compare what was not compared yet; return range and name of the pieces that differ.

        No read may be in progress.
        """
        self.comparison.finish()
        return self.comparison.wrong

    def compare_again(self, start: int, stop: int) -> None:
        """Compare the pieces that have bytes of [start, stop) again, after `damaged`."""
        self.comparison.again(start, stop)


class _Comparison:
    """Compares pieces in file order, in the thread that has filled the next bytes.

    XXH3 is ten times faster than a disk, and other reads are in flight during that time. A thread
    of its own would hold Python's lock for the small pieces, and the device would wait.
    """

    def __init__(self, image: FileImage, record: FileRecord) -> None:
        self._image, self._pieces = image, record.pieces
        self._ends = list(itertools.accumulate(piece.size_bytes for piece in record.pieces))
        self._expected = [piece.xxh3_64 for piece in record.pieces]
        self._lock = threading.Lock()
        self._ahead: dict[int, int] = {}  # ranges that arrived before the bytes in front of them
        self._position = 0
        self._number = 0  # of the piece at `_position`
        self._part: xxhash.xxh3_64 | None = None  # of its bytes before `_position`
        self._failure: Exception | None = None
        self._wrong: set[int] = set()

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return self._ends[-1] if self._ends else 0

    @property
    def wrong(self) -> list[tuple[int, int, str]]:
        """Range and name of the pieces that differ."""
        if not self._wrong:  # there may be 100,000 pieces
            return []
        return [
            (*own, self._pieces[number].name or "the header")
            for number, own in self._ranges()
            if number in self._wrong
        ]

    def again(self, start: int, stop: int) -> None:
        """Compare the pieces with bytes of [start, stop) again."""
        for number, (begin, end) in self._ranges():
            if begin < stop and start < end:
                digest = xxhash.xxh3_64()
                for view in self._image.views(begin, end):
                    digest.update(view.data)
                right = digest.hexdigest() == self._pieces[number].xxh3_64
                (self._wrong.discard if right else self._wrong.add)(number)

    def _ranges(self) -> Iterator[tuple[int, tuple[int, int]]]:
        return enumerate(itertools.pairwise([0, *self._ends]))

    def arrived(self, start: int, stop: int) -> None:
        """Compare what is complete. Raises nothing: a writer's completion callback calls it."""
        with self._lock:
            try:
                self._ahead[start] = stop
                while (end := self._ahead.pop(self._position, 0)) > self._position:
                    self._compare_until(end)
            except Exception as error:  # noqa: BLE001 -- raised by `finish`
                self._failure = self._failure or error

    def finish(self) -> None:
        """Compare the rest: pieces that no call of `arrived` reported, and empty ones."""
        if self._failure is not None:
            raise self._failure
        self._compare_until(self._image.size_bytes)
        self._take(memoryview(b""))

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
