"""Checksums of a file image, one per piece: computed by a save."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import xxhash

from iobench.checkpoint.manifest import FileRecord, Piece
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import FileImage

__all__ = ["record_of"]


def record_of(
    image: FileImage, pieces: Sequence[tuple[str, int]], *, threads: int = 1
) -> FileRecord:
    """Return the record of the file `image`, whose `pieces` are (name, bytes) each."""
    digests = _digests(image, [size for _, size in pieces], threads)
    return FileRecord(
        path=image.path,
        size_bytes=image.size_bytes,
        pieces=tuple(
            Piece(name=name, size_bytes=size, xxh3_64=digest)
            for (name, size), digest in zip(pieces, digests, strict=True)
        ),
    )


def _digests(image: FileImage, sizes: Iterable[int], threads: int) -> list[str]:
    ends = [0, *itertools.accumulate(sizes)]

    def digest(piece: tuple[int, int]) -> str:
        state = xxhash.xxh3_64()
        for view in image.views(*piece):
            state.update(view.data)
        return state.hexdigest()

    return map_in_workers(threads, digest, list(itertools.pairwise(ends)))
