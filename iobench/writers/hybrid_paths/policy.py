"""PathPolicy: which path one operation takes, and why. Decides only; moves nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from iobench.writers.hybrid_paths.memory_pressure import Pressure

__all__ = ["Decision", "IoOperation", "IoPath", "PathPolicy", "Position"]


class IoPath(StrEnum):
    """The ways between memory and storage."""

    DIRECT = "direct"
    """O_DIRECT: past the page cache, least CPU, aligned blocks only."""
    UNCACHED = "uncached"
    """Through the page cache, on storage and out of memory when the operation returns."""
    BUFFERED = "buffered"
    """Through the page cache, which keeps it."""


class Position(Enum):
    """Where in its file an operation lies."""

    WHOLE = "small file"
    FIRST = "header"
    MIDDLE = "small"
    TAIL = "tail"


@dataclass(frozen=True, kw_only=True)
class IoOperation:
    """What is to be moved. `aligned` is of offset and length, `memory_aligned` of the memory."""

    size_bytes: int
    position: Position = Position.MIDDLE
    aligned: bool = True
    memory_aligned: bool = False
    in_cache: bool = False
    """All of it lies in the page cache already; only of use to a read."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The path, and the reason in a few words; equal situations have equal words."""

    path: IoPath
    reason: str


class _Rate:
    """A path's running rate: the mean of what its operations reached, the newest counting most."""

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
        """Whether it fell below `part` of its best. It is then taken for what this path does."""
        if self.bytes_per_s is None or self.bytes_per_s >= part * self.best:
            return False
        self.best = self.bytes_per_s
        return True


class PathPolicy:
    """Chooses among `paths` for the operations of one transfer. Thread-safe, and re-entrant: a
    signal handler that saves may come in at any point.

    Small operations go through the page cache: a direct write of a few KiB waits for the device
    alone, while write-back takes it along with others. Large ones go past it. Which of the two ways
    past it, is measured: the transfer starts on the first of them that `paths` allows and tries
    the other now and then, at once when its own has become slow. It moves over after
    three trials that were a quarter faster, and back by the same rule. Between them its own path
    goes on for a while: storage that hangs for a moment is slow on every path, and a trial
    just after would always win.

    The rate of a path is that of single operations. It is comparable because both ways past the
    cache return only when the bytes have reached the device; that of `buffered` would not be.
    """

    FIRST_TRIAL = 512
    """Large operations before the other path is tried; doubled by each trial that did not win."""
    FIRST_TRIAL_BACK = 32
    """The same once the transfer has moved: three operations are little to believe in."""
    LAST_TRIAL = 4096
    FASTER = 1.25
    WINS = 3
    SLOW = 0.5
    """A path is slow that has fallen below this part of its own best rate."""
    SETTLED = 16
    """Operations before a path's rate is believed that far, and between trials that win."""

    def __init__(
        self, paths: Sequence[IoPath] = tuple(IoPath), *, small_size: int, read_soon: bool = False
    ) -> None:
        """Operations below `small_size` bytes are small. `paths`, not empty, are in the order in
        which large operations prefer them."""
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
        """The path of one operation."""
        with self._lock:
            return self._choose(operation, pressure.reason)

    def learn(self, path: IoPath, size_bytes: int, seconds: float) -> None:
        """An operation of `size_bytes` that took `path` was done in `seconds`."""
        if size_bytes < self._small_size or seconds <= 0 or path not in self._large:
            return
        with self._lock:
            self._rates[path].add(size_bytes / seconds)
            own = self._large[0]
            if path == own:
                rate = self._rates[own]
                if rate.operations >= self.SETTLED and rate.slow(self.SLOW):
                    self._due = True  # one trial for one fall
            else:
                self._judge(size_bytes / seconds)

    def has(self, path: IoPath) -> bool:
        """Whether `path` may still be chosen."""
        return path in self._paths

    def drop(self, path: IoPath) -> bool:
        """`path` cannot be had after all. False when it is the last and stays."""
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
        """The ways past the page cache that may be taken, the one in use first; never empty."""
        past: list[IoPath] = [path for path in self._paths if path != IoPath.BUFFERED]
        return past or [IoPath.BUFFERED]
