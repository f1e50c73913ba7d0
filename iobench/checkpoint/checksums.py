"""Digests: checksums of a file image, one per piece, computed by a save."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from iobench.checkpoint.manifest import FileRecord, Piece
from iobench.formats.collector import collector_paused
from iobench.units import MIB
from iobench.writers.image import Bytes, FileImage

__all__ = ["Digests", "record_of"]

_RUN = MIB  # of small pieces: few calls of Python, and other threads do not wait long for the GIL
_EMPTY = np.empty(0, dtype=np.uint8)


def record_of(image: FileImage, pieces: Sequence[tuple[str, int]]) -> FileRecord:
    """Return the record of the file `image`, whose `pieces` are (name, bytes) each."""
    digests = Digests(image, pieces)
    digests.compute()
    return digests.record()


class Digests:
    """XXH3-64 of each piece of `image`. Several threads may compute them."""

    def __init__(self, image: FileImage, pieces: Sequence[tuple[str, int]]) -> None:
        """`pieces` are (name, bytes); they follow one another without gaps."""
        self._image, self._pieces = image, pieces
        self._sizes = [size for _, size in pieces]
        self._ends = list(itertools.accumulate(self._sizes))
        self._begins = [0, *self._ends[:-1]]
        self._found = [""] * len(pieces)

    def compute(self, *, above: int = -1) -> None:
        """Compute what was not computed yet, of the pieces of more than `above` bytes."""
        sizes, found = self._sizes, self._found
        if max(sizes, default=0) <= above:
            return
        due = [at for at, digest in enumerate(found) if not digest and sizes[at] > above]
        for first, last in self._runs(due):
            found[first:last] = _digests_of(self._image, self._begins[first], sizes[first:last])

    def compute_in(self, start: int, stop: int, block: Bytes) -> None:
        """Compute the pieces that are whole in the bytes [start, stop), of which `block` is a copy.

        The copy is in the cache of the processor. Other pieces are left to `compute`.
        """
        first = bisect.bisect_left(self._begins, start)
        last = bisect.bisect_right(self._ends, stop, lo=first)
        if first >= last:
            return
        memory, digest = block.data, xxhash.xxh3_64_hexdigest
        begins, ends, found = self._begins, self._ends, self._found
        found[first:last] = [
            old or digest(memory[begin - start : end - start])
            for old, begin, end in zip(
                found[first:last], begins[first:last], ends[first:last], strict=True
            )
        ]

    @property
    def found(self) -> list[str]:
        """The checksums of all pieces, in hex; "" where it was not computed."""
        return self._found

    def record(self) -> FileRecord:
        """Return the record of the file, after `compute`."""
        with collector_paused():
            names = [name for name, _ in self._pieces]
            listed = tuple(map(Piece, names, self._sizes, self._found))
        return FileRecord(path=self._image.path, size_bytes=self._image.size_bytes, pieces=listed)

    def _runs(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of consecutive pieces: one large piece, or up to `_RUN` bytes."""
        if not numbers:
            return
        first = last = numbers[0]
        for number in numbers:
            if number > last or (
                number > first and self._ends[number] - self._begins[first] > _RUN
            ):
                yield first, last
                first = number
            last = number + 1
        yield first, last


def _digests_of(image: FileImage, begin: int, sizes: list[int]) -> list[str]:
    views = image.views(begin, begin + sum(sizes))
    if len(sizes) == 1:
        state = xxhash.xxh3_64()
        for view in views:
            state.update(view.data)
        return [state.hexdigest()]
    if list(map(len, views)) != sizes:  # one segment holds several pieces, or a piece is empty
        run = views[0] if len(views) == 1 else np.concatenate([_EMPTY, *views])
        ends = [0, *itertools.accumulate(sizes)]
        views = [run[start:stop] for start, stop in itertools.pairwise(ends)]
    return [xxhash.xxh3_64_hexdigest(view.data) for view in views]
