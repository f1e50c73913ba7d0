"""PathPolicy: chooses the path of each operation of the `hybrid` writer, with a reason."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from iobench.writers.hybrid_paths.memory_pressure import Pressure

__all__ = ["Decision", "IoOperation", "IoPath", "PathPolicy", "Position"]


class IoPath(StrEnum):
    """The paths between memory and storage."""

    DIRECT = "direct"
    """O_DIRECT: past the page cache, with the least CPU time, for aligned blocks only."""
    UNCACHED = "uncached"
    """Through the page cache. On return the bytes are on storage and their pages are dropped."""
    BUFFERED = "buffered"
    """Through the page cache, which keeps the bytes."""


class Position(Enum):
    """The position of an operation in its file."""

    WHOLE = "small file"
    FIRST = "header"
    MIDDLE = "small"
    TAIL = "tail"


@dataclass(frozen=True, kw_only=True)
class IoOperation:
    """One operation. `aligned` describes offset and length, `memory_aligned` the memory."""

    size_bytes: int
    position: Position = Position.MIDDLE
    aligned: bool = True
    memory_aligned: bool = False
    in_cache: bool = False
    """All bytes are in the page cache already; used for reads only."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The path, and the reason in a few words; equal situations have equal reasons."""

    path: IoPath
    reason: str


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
        self._lock = threading.RLock()

    def choose(self, operation: IoOperation, pressure: Pressure = Pressure()) -> Decision:  # noqa: B008 -- frozen
        """Choose the path of one operation."""
        paths, pressed = self._paths, pressure.reason
        if operation.in_cache and IoPath.BUFFERED in paths:
            return Decision(path=IoPath.BUFFERED, reason="in the page cache")
        if operation.size_bytes < self._small_size:
            small = operation.position.value
            if pressed:
                return _first(paths, f"{small}, {pressed}", IoPath.UNCACHED, IoPath.BUFFERED)
            return _first(paths, small, IoPath.BUFFERED, IoPath.UNCACHED)
        if self._read_soon and not pressed and IoPath.BUFFERED in paths:
            return Decision(path=IoPath.BUFFERED, reason="read soon")
        if not operation.aligned:
            return _first(paths, "unaligned", IoPath.UNCACHED, IoPath.BUFFERED)
        path = next((one for one in paths if one != IoPath.BUFFERED), IoPath.BUFFERED)
        reason = "large"
        if path == IoPath.DIRECT and not operation.memory_aligned:
            reason += ", staged"
        if self._read_soon and pressed:
            reason += f", {pressed}"
        return Decision(path=path, reason=reason)

    def has(self, path: IoPath) -> bool:
        """Whether `path` may still be chosen."""
        return path in self._paths

    def drop(self, path: IoPath) -> bool:
        """Stop using `path`, which does not work. Return False if it is the last one: it stays."""
        with self._lock:
            left = tuple(one for one in self._paths if one != path)
            if left:
                self._paths = left
            return bool(left)


def _first(paths: Sequence[IoPath], reason: str, *wanted: IoPath) -> Decision:
    path = next((path for path in wanted if path in paths), paths[0])
    return Decision(path=path, reason=reason)
