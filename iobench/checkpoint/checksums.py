"""PieceDigests: checksums of a file image, one per piece, computed by a save."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from iobench.checkpoint.manifest import FileRecord, Piece
from iobench.checkpoint.pieces import Pieces
from iobench.formats.collector import collector_paused
from iobench.units import MIB
from iobench.writers.image import Bytes, FileImage

__all__ = ["PieceDigests", "record_of"]

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
        self._found, self._done = [""] * len(pieces), bytearray(len(pieces))

    def compute(self, *, above: int = -1, before: int | None = None) -> None:
        """Compute what was not computed yet, of the pieces of more than `above` bytes.

        With `before`, of those that begin before this byte.
        """
        pieces, found = self._pieces, self._found
        if pieces.largest_bytes <= above:
            return
        last = None if before is None else bisect.bisect_left(pieces.begins, before)
        due = [at for at in self._missing(last) if pieces.sizes[at] > above]
        for first, last in self._runs(due):
            sizes = pieces.sizes[first:last]
            found[first:last] = _digests_of(self._image, pieces.begins[first], sizes)
            self._done[first:last] = b"\1" * (last - first)

    def compute_in(self, start: int, stop: int, block: Bytes) -> None:
        """Compute the pieces that are whole in the bytes [start, stop), of which `block` is a copy.

        The copy is in the cache of the processor. Other pieces are left to `compute`.
        """
        begins, ends, found = self._pieces.begins, self._pieces.ends, self._found
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
        self._done[first:last] = b"\1" * (last - first)

    @property
    def found(self) -> list[str]:
        """The checksums of all pieces, in hex; "" where it was not computed."""
        return self._found

    def record(self) -> FileRecord:
        """Return the record of the file, after `compute`."""
        with collector_paused():
            listed = tuple(map(Piece, self._pieces.names, self._pieces.sizes, self._found))
        return FileRecord(path=self._image.path, size_bytes=self._image.size_bytes, pieces=listed)

    def _missing(self, last: int | None) -> Iterator[int]:
        """Yield the numbers of the pieces without a checksum: few among many, as a rule."""
        at = self._done.find(0, 0, last)
        while at >= 0:
            yield at
            at = self._done.find(0, at + 1, last)

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
