"""Checksums of a file image, one per piece: computed by a save."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from iobench.checkpoint.manifest import FileRecord, Piece
from iobench.units import MIB
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import FileImage

__all__ = ["record_of"]

_RUN = MIB  # of small pieces: few calls of Python, and other threads do not wait long for the GIL
_EMPTY = np.empty(0, dtype=np.uint8)


def record_of(
    image: FileImage, pieces: Sequence[tuple[str, int]], *, threads: int = 1
) -> FileRecord:
    """Return the record of the file `image`, whose `pieces` are (name, bytes) each."""
    digests = _digests(image, [size for _, size in pieces], threads)
    return FileRecord(
        path=image.path,
        size_bytes=image.size_bytes,
        pieces=tuple(
            Piece(name, size, digest) for (name, size), digest in zip(pieces, digests, strict=True)
        ),
    )


def _digests(image: FileImage, sizes: Sequence[int], threads: int) -> list[str]:
    found = map_in_workers(threads, lambda run: _digests_of(image, *run), list(_runs(sizes)))
    return list(itertools.chain.from_iterable(found))


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield consecutive pieces, as offset and sizes: one large piece, or up to `_RUN` bytes."""
    begin, run, total = 0, list[int](), 0
    for size in sizes:
        if run and total + size > _RUN:
            yield begin, run
            begin, run, total = begin + total, [], 0
        run.append(size)
        total += size
    if run:
        yield begin, run


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
