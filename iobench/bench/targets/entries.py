"""The entries below a directory, one at a time: a checkpoint may have 100,000 files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FilesBelow", "entries_below"]


@dataclass(frozen=True)
class FilesBelow:
    """The paths of all regular files below a directory; each iteration lists them again."""

    directory: str | os.PathLike[str]

    def __iter__(self) -> Iterator[str]:
        return filter(os.path.isfile, entries_below(self.directory))


def entries_below(directory: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of everything below `directory` except directories; follow no links.

    A directory that was removed has no entries. Raises OSError for one that cannot be listed.
    """
    inner = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.path)
            else:
                yield entry.path
    for path in inner:
        yield from entries_below(path)
