"""PathPolicy: chooses the path of each operation of the `hybrid` writer, with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class IoPath(StrEnum):
    """The paths between memory and storage."""

    DIRECT = "direct"
    """O_DIRECT: past the page cache, with the least CPU time, for aligned blocks only."""
    UNCACHED = "uncached"
    """Through the page cache. On return the bytes are on storage and their pages are dropped."""
    BUFFERED = "buffered"
    """Through the page cache, which keeps the bytes."""


class PathPolicy:
    """Chooses among `paths` for the operations of one transfer. Thread-safe and reentrant: a signal
    handler that saves may run at any point.

    Small operations go through the page cache: a direct write of a few KiB waits for the device on
    its own, while write-back combines it with others. Large operations go past the cache, by
    O_DIRECT where it works. Trying the other path now and then was no faster (docs/decisions/0020).
    """

    def __init__(
        self, paths: Sequence[IoPath] = tuple(IoPath), *, small_size: int, read_soon: bool = False
    ) -> None:
        """Operations below `small_size` bytes are small. `paths` is not empty; large operations
        prefer its first entries."""
        assert paths
        self._paths = tuple(paths)
        self._small_size, self._read_soon = small_size, read_soon

    def choose(
        self, size_bytes: int, *, aligned: bool = True, in_cache: bool = False
    ) -> tuple[IoPath, str]:
        """Return the path of one operation, and the reason in a few words.

        `aligned` describes its offset and length. `in_cache` says of a read that the page cache has
        all bytes.
        """
        if in_cache and IoPath.BUFFERED in self._paths:
            return IoPath.BUFFERED, "in the page cache"
        if size_bytes < self._small_size:
            return self._first(IoPath.BUFFERED, IoPath.UNCACHED), "small"
        if self._read_soon and IoPath.BUFFERED in self._paths:
            return IoPath.BUFFERED, "read soon"
        if not aligned:
            return self._first(IoPath.UNCACHED, IoPath.BUFFERED), "unaligned"
        return self._first(IoPath.DIRECT, IoPath.UNCACHED), "large"

    def _first(self, *wanted: IoPath) -> IoPath:
        paths = self._paths
        return next((path for path in wanted if path in paths), paths[0])

    def has(self, path: IoPath) -> bool:
        """Whether `path` may still be chosen."""
        return path in self._paths

    def drop(self, path: IoPath) -> None:
        """Stop using `path`, which does not work. The last one stays."""
        self._paths = tuple(one for one in self._paths if one != path) or self._paths
