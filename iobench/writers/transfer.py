"""Transfer: the record of one write or read. Meter: the running counts that become a Transfer.

Latency: how long the operations of one kind took, LatencyFigures: its percentiles.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Self

_BITS = 7  # of a latency in ns that its bin keeps, like fio: bins are at most 1.6% wide
_NS = 1_000_000_000


@dataclass(kw_only=True)
class Latency:
    """A histogram with bins of equal relative width, like an HdrHistogram. Not thread-safe.

    `bins` maps the lower end of each bin, in nanoseconds, to its number of operations. A bin holds
    the latencies with the same first 7 bits: below 128 ns it is 1 ns wide, above it at most 1/64 of
    its lower end. `max_ns` is the longest latency, exactly.
    """

    max_ns: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_ns < 0 or any(low < 0 or n < 1 for low, n in self.bins.items()):
            raise ValueError("latencies and their numbers must not be negative")

    @property
    def count(self) -> int:
        """The number of operations."""
        return sum(self.bins.values())

    def percentile_s(self, percent: float) -> float:
        """Return the latency in seconds that `percent` of the operations do not exceed.

        It is the smallest one with this property (the nearest rank, like fio), and is exact to half
        the width of a bin: 0.8%. 100 is the longest latency. Raises ValueError without operations
        or outside of 0 to 100.
        """
        count = self.count
        if not count or not 0 <= percent <= 100:
            raise ValueError(f"no percentile {percent} of {count} operations")
        rank = max(1, math.ceil(percent / 100 * count))
        if rank == count:
            return self.max_ns / _NS
        below = 0
        for low, operations in sorted(self.bins.items()):
            below += operations
            if below >= rank:
                return min(low + (_width(low) - 1) / 2, self.max_ns) / _NS
        raise AssertionError("the bins hold all operations")

    def took(self, seconds: float) -> None:
        """Count one operation. This costs about a microsecond."""
        passed = max(0, round(seconds * _NS))
        spare = passed.bit_length() - _BITS
        low = passed >> spare << spare if spare > 0 else passed
        self.bins[low] = self.bins.get(low, 0) + 1
        if passed > self.max_ns:
            self.max_ns = passed

    def add(self, more: Latency) -> None:
        """Count the operations of `more` too."""
        for low, operations in more.bins.items():
            self.bins[low] = self.bins.get(low, 0) + operations
        self.max_ns = max(self.max_ns, more.max_ns)

    @classmethod
    def total(cls, parts: Iterable[Latency]) -> Latency:
        """Return the latencies of all `parts` together."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Percentiles of the operations of one kind.

    A percentile is None where less than one operation is above it: p99.9 needs 1,000 operations.
    """

    operations: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    p99_9_s: float | None
    max_s: float

    @classmethod
    def of(cls, latency: Latency) -> Self:
        """Raises ValueError without operations."""
        p50, p95, p99, p99_9 = (_known(latency, one) for one in (50.0, 95.0, 99.0, 99.9))
        return cls(
            operations=latency.count,
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            p99_9_s=p99_9,
            max_s=latency.percentile_s(100),
        )


def _known(latency: Latency, percent: float) -> float | None:
    above = latency.count * (1 - percent / 100)
    return latency.percentile_s(percent) if above >= 1 - 1e-9 else None


def _width(low: int) -> int:
    """Return the width of the bin that begins at `low`."""
    return 1 << max(0, low.bit_length() - _BITS)


TICK_S = 0.01
"""The resolution of `Transfer.completed`, in seconds."""


@dataclass(frozen=True, kw_only=True)
class PathCount:
    """Operations and bytes that took one path, such as `direct`, `buffered` or `uncached`."""

    operations: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A feature that was unavailable (`wanted`), the one that replaced it (`used`), and why."""

    wanted: str
    used: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The record of one or several files that one writer moved.

    `phases_s` are seconds of wall clock. Phases of concurrent workers (gather, write, read,
    scatter) are averaged over the workers, so that all phases add up to about `elapsed_s`.
    `latencies` has the duration of each `write`, `read` and `sync` of a block or file, and of each
    `upload` of a part: from the call to its return, or from the submission of an asynchronous
    operation until this process took its completion.
    `durable` says whether the bytes are on storage on return. With `sync_directory=False` their
    name is not durable yet.
    `decisions` counts the operations of a writer that chooses by path and reason: "direct: large".
    `completed` maps each tick of `TICK_S` seconds of time.perf_counter to the bytes of the
    operations that ended in it. Padding counts, as in `paths`.
    `read_amplification` of a restore by several ranks: the bytes that they read from storage
    together, divided by the bytes that at least one of them needs. None for one rank.
    """

    writer: str
    operation: Literal["write", "read"]
    files: int
    bytes: int
    elapsed_s: float
    durable: bool
    phases_s: Mapping[str, float]
    paths: Mapping[str, PathCount]
    retries: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    completed: Mapping[int, int] = field(default_factory=dict)
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    read_amplification: float | None = None

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes divided by seconds; infinite when no time passed."""
        return self.bytes / self.elapsed_s if self.elapsed_s else float("inf")

    @classmethod
    def total(cls, parts: Iterable[Transfer]) -> Transfer:
        """Add up transfers that one writer made in sequence. Raises ValueError if empty.

        Keeps none of the parts, of which there may be 100,000.
        """
        whole = Meter()
        last: Transfer | None = None
        files = size = 0
        elapsed_s, durable = 0.0, True
        for last in parts:
            whole.add(last, last.phases_s)
            files, size = files + last.files, size + last.bytes
            elapsed_s, durable = elapsed_s + last.elapsed_s, durable and last.durable
        if last is None:
            raise ValueError("no transfers to add up")
        total = whole.transfer(last.writer, last.operation, size, durable=durable, files=files)
        return replace(total, elapsed_s=elapsed_s)

    @classmethod
    def concurrent(cls, parts: Sequence[Transfer]) -> Transfer:
        """Add up concurrent transfers: `elapsed_s` is the longest, and phases are averaged.

        Transfers without files do not count in the averages. Raises ValueError if empty.
        """
        total = cls.total(parts)
        busy = sum(part.files > 0 for part in parts) or len(parts)
        return replace(
            total,
            elapsed_s=max(part.elapsed_s for part in parts),
            phases_s={name: seconds / busy for name, seconds in total.phases_s.items()},
        )


def _add_paths(into: dict[str, PathCount], more: Mapping[str, PathCount]) -> None:
    for path, count in more.items():
        have = into.get(path, PathCount(operations=0, bytes=0))
        into[path] = PathCount(
            operations=have.operations + count.operations, bytes=have.bytes + count.bytes
        )


class _Timer:
    """The timer of a phase, and of the latency of one operation unless it fails.

    A class, as a generator costs twice as much, and a small file passes six phases.
    """

    __slots__ = ("_began", "_latency", "_name", "_seconds")

    def __init__(
        self, seconds: dict[str, float], name: str, latency: Latency | None = None
    ) -> None:
        self._seconds, self._name, self._latency = seconds, name, latency

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        passed = time.perf_counter() - self._began
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + passed
        if self._latency is not None and raised is None:
            self._latency.took(passed)


@dataclass(kw_only=True)
class Meter:
    """Counts the phases and paths of one worker.

    Not thread-safe: each thread has its own meter, and `absorb` adds them up.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    paths: dict[str, PathCount] = field(default_factory=dict)
    retries: int = 0
    fallbacks: dict[Fallback, None] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)
    completed: Counter[int] = field(default_factory=Counter)
    latencies: dict[str, Latency] = field(default_factory=dict)
    started_s: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside the `with` to the phase `name`."""
        return _Timer(self.seconds, name)

    def operation(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside the `with` to the phase `name`, as the latency of one operation."""
        return _Timer(self.seconds, name, self._latency(name))

    def took(self, name: str, seconds: float) -> None:
        """Count the latency of one operation whose time is in no phase: others were in flight."""
        self._latency(name).took(seconds)

    def _latency(self, name: str) -> Latency:
        found = self.latencies.get(name)
        if found is None:
            found = self.latencies[name] = Latency()
        return found

    def count(self, path: str, size_bytes: int, operations: int = 1) -> None:
        """Count `operations` that took `path` and have just ended; `size_bytes` is their sum."""
        _add_paths(self.paths, {path: PathCount(operations=operations, bytes=size_bytes)})
        if size_bytes:
            self.completed[int(time.perf_counter() / TICK_S)] += size_bytes

    def fell_back(self, wanted: str, used: str, reason: str) -> None:
        """Record a fallback; equal ones count once."""
        self.fallbacks[Fallback(wanted=wanted, used=used, reason=reason)] = None

    def decided(self, path: str, reason: str) -> None:
        """Count one operation for which `path` was chosen for `reason`."""
        self.decisions[f"{path}: {reason}"] += 1

    def absorb(self, workers: Iterable[Meter], elapsed_s: float = 0.0) -> None:
        """Add the counts of concurrent workers: seconds are averaged, all else is summed.

        `elapsed_s` is the time that they took together. What is in no phase of theirs is the phase
        `threads`: they start, take their next block, and the first waits for the last.
        """
        meters = list(workers)
        for meter in meters:
            self.add(meter, meter.seconds, workers=len(meters))
        rest_s = elapsed_s - sum(sum(one.seconds.values()) for one in meters) / (len(meters) or 1)
        if rest_s > 0:
            self.seconds["threads"] = self.seconds.get("threads", 0.0) + rest_s

    def add(
        self, done: Meter | Transfer, seconds: Mapping[str, float], *, workers: int = 1
    ) -> None:
        """Add the counts of `done`, and its `seconds` divided by the number of `workers`."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent / workers
        _add_paths(self.paths, done.paths)
        self.retries += done.retries
        self.fallbacks.update(dict.fromkeys(done.fallbacks))
        self.decisions.update(done.decisions)
        self.completed.update(done.completed)
        for name, more in done.latencies.items():
            self._latency(name).add(more)

    def elapsed_s(self) -> float:
        """Seconds since the meter was made."""
        return time.perf_counter() - self.started_s

    def transfer(
        self,
        writer: str,
        operation: Literal["write", "read"],
        size_bytes: int,
        *,
        durable: bool,
        files: int = 1,
    ) -> Transfer:
        """Return the counts as a Transfer; `elapsed_s` is the time since the meter was made."""
        return Transfer(
            writer=writer,
            operation=operation,
            files=files,
            bytes=size_bytes,
            elapsed_s=self.elapsed_s(),
            durable=durable,
            phases_s=dict(self.seconds),
            paths=dict(self.paths),
            retries=self.retries,
            fallbacks=tuple(self.fallbacks),
            decisions=dict(self.decisions),
            completed=dict(self.completed),
            latencies={
                name: Latency.total([one]) for name, one in self.latencies.items() if one.bins
            },
        )
