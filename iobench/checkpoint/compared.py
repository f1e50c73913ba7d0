"""compared: compares a file with the checksums of its manifest while a writer reads it."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import xxhash

from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError
from iobench.ranks.progress import WatchedImage
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["compared", "read_compared", "read_file"]


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
    if not comparison.size_bytes == image.size_bytes == record.size_bytes:
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
