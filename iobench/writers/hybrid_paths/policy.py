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


class _Rate:
    """The rate of a path: an exponentially weighted mean over its operations."""

    _WEIGHT = 0.25

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.best: float = 0.0
        self.operations = 0

    def add(self, rate: float) -> None:
        self.operations += 1
        old = rate if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = old + self._WEIGHT * (rate - old)
        self.best = max(self.best, self.bytes_per_s)

    def slow(self, part: float) -> bool:
        """Whether the rate fell below `part` of its best; if so, it becomes the new best."""
        if self.bytes_per_s is None or self.bytes_per_s >= part * self.best:
            return False
        self.best = self.bytes_per_s
        return True


class PathPolicy:
    """Chooses among `paths` for the operations of one transfer. Thread-safe and reentrant: a signal
    handler that saves may run at any point.

    Small operations go through the page cache: a direct write of a few KiB waits for the device on
    its own, while write-back combines it with others. Large operations go past the cache, by the
    direct or the uncached path. The faster one is measured: the transfer starts on the first of
    them in `paths` and tries the other one now and then, and at once when its own becomes slow. It
    changes paths after three trials in a row that were 25% faster, and changes back by the same
    rule. Between two trials the current path is used for a while: storage that stalls for a moment
    is slow on every path, and a trial just after the stall would always win.

    The rate of a path is that of single operations. The rates of these two paths are comparable, as
    both return only when the bytes have reached the device. The rate of `buffered` is not.
    """

    FIRST_TRIAL = 512
    """Large operations before a trial of the other path; doubled by each trial that loses."""
    FIRST_TRIAL_BACK = 32
    """The same after a change of path: three trials are little evidence, so it checks early."""
    LAST_TRIAL = 4096
    """The most large operations between two trials."""
    FASTER = 1.25
    WINS = 3
    SLOW = 0.5
    """A path is slow when its rate is below this part of its own best rate."""
    SETTLED = 16
    """Operations before a path can count as slow, and between two trials that win."""

    def __init__(
        self, paths: Sequence[IoPath] = tuple(IoPath), *, small_size: int, read_soon: bool = False
    ) -> None:
        """Operations below `small_size` bytes are small. `paths` is not empty; large operations
        prefer its first entries."""
        assert paths
        self._paths = list(paths)
        self._small_size, self._read_soon = small_size, read_soon
        self._lock = threading.RLock()
        self._rates = {path: _Rate() for path in IoPath}
        self._large = self._large_paths()
        self._interval = self._wait = self.FIRST_TRIAL
        self._since, self._wins = 0, 0
        self._due = False

    def choose(self, operation: IoOperation, pressure: Pressure = Pressure()) -> Decision:  # noqa: B008 -- frozen
        """Choose the path of one operation."""
        with self._lock:
            return self._choose(operation, pressure.reason)

    def learn(self, path: IoPath, size_bytes: int, seconds: float) -> None:
        """Learn that an operation of `size_bytes` took `path` and `seconds`."""
        if size_bytes < self._small_size or seconds <= 0 or path not in self._large:
            return
        with self._lock:
            self._rates[path].add(size_bytes / seconds)
            own = self._large[0]
            if path == own:
                rate = self._rates[own]
                if rate.operations >= self.SETTLED and rate.slow(self.SLOW):
                    self._due = True  # one trial each time it becomes slow
            else:
                self._judge(size_bytes / seconds)

    def has(self, path: IoPath) -> bool:
        """Whether `path` may still be chosen."""
        return path in self._paths

    def drop(self, path: IoPath) -> bool:
        """Stop using `path`, which does not work. Return False if it is the last one: it stays."""
        with self._lock:
            left = [one for one in self._paths if one != path]
            if left:
                self._paths = left
                self._large = self._large_paths()
            return bool(left)

    def _choose(self, operation: IoOperation, pressed: str) -> Decision:
        if operation.in_cache and IoPath.BUFFERED in self._paths:
            return Decision(path=IoPath.BUFFERED, reason="in the page cache")
        if operation.size_bytes < self._small_size:
            small = operation.position.value
            if pressed:
                return self._first(f"{small}, {pressed}", IoPath.UNCACHED, IoPath.BUFFERED)
            return self._first(small, IoPath.BUFFERED, IoPath.UNCACHED)
        if self._read_soon and not pressed and IoPath.BUFFERED in self._paths:
            return Decision(path=IoPath.BUFFERED, reason="read soon")
        if not operation.aligned:
            return self._first("unaligned", IoPath.UNCACHED, IoPath.BUFFERED)
        return self._choose_large(operation, pressed)

    def _choose_large(self, operation: IoOperation, pressed: str) -> Decision:
        own, *other = self._large
        if other:
            self._since += 1
            if self._due or self._since > self._wait:
                self._since, self._due = 0, False
                return Decision(path=other[0], reason="trial")
        reason = "large" if own == self._preferred() else "large, faster here"
        if own == IoPath.DIRECT and not operation.memory_aligned:
            reason += ", staged"
        if self._read_soon and pressed:
            reason += f", {pressed}"
        return Decision(path=own, reason=reason)

    def _judge(self, rate: float) -> None:
        own = self._rates[self._large[0]].bytes_per_s
        if own is None or rate <= self.FASTER * own:
            self._wins = 0
            self._interval = self._wait = min(2 * self._interval, self.LAST_TRIAL)
            return
        self._wins += 1
        self._wait = self.SETTLED
        if self._wins == self.WINS:
            self._large.reverse()
            self._interval = self._wait = self.FIRST_TRIAL_BACK
            self._since, self._wins, self._due = 0, 0, False

    def _first(self, reason: str, *wanted: IoPath) -> Decision:
        path = next((path for path in wanted if path in self._paths), self._paths[0])
        return Decision(path=path, reason=reason)

    def _preferred(self) -> IoPath:
        return self._large_paths()[0]

    def _large_paths(self) -> list[IoPath]:
        """Return the paths for large operations, the preferred one first; never empty."""
        past: list[IoPath] = [path for path in self._paths if path != IoPath.BUFFERED]
        return past or [IoPath.BUFFERED]
