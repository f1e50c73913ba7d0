"""shares: which rank moves which file of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.ranked.content import data_file

__all__ = ["shares"]


def shares(files: Sequence[FileRecord], ranks: int) -> list[list[FileRecord]]:
    """Return the files of each rank: those that it saved itself, and of the others an equal part.

    The others are shared out by size, the largest first, to the rank with the fewest bytes.
    """
    own = {data_file(rank): rank for rank in range(ranks)}
    found: list[list[FileRecord]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for file in sorted(files, key=lambda file: (file.path not in own, -file.size_bytes)):
        rank = own.get(file.path, min(range(ranks), key=sizes.__getitem__))
        found[rank].append(file)
        sizes[rank] += file.size_bytes
    return found
