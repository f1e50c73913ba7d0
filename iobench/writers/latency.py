"""Latency: how long the operations of one kind took. LatencyCounter: the running counts of it.

LatencyFigures: its percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

_BITS = 7  # of a latency in ns that its bin keeps, like fio: bins are at most 1.6% wide
_NS = 1_000_000_000


class _Counts(Protocol):
    @property
    def bins(self) -> Mapping[int, int]: ...
    @property
    def max_ns(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Latency:
    """A histogram with bins of equal relative width, like an HdrHistogram.

    `bins` maps the lower end of each bin, in nanoseconds, to its number of operations. A bin holds
    the latencies with the same first 7 bits: below 128 ns it is 1 ns wide, above it at most 1/64 of
    its lower end. `max_ns` is the longest latency, exactly.
    """

    max_ns: int
    bins: Mapping[int, int]

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

    @classmethod
    def total(cls, parts: Iterable[_Counts]) -> Self:
        """Return the latencies of all `parts` together."""
        counter = LatencyCounter()
        for part in parts:
            counter.add(part)
        return cls(max_ns=counter.max_ns, bins=dict(counter.bins))


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


class LatencyCounter:
    """Counts latencies. One operation costs about a microsecond. Not thread-safe."""

    __slots__ = ("bins", "max_ns")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.max_ns = 0

    def took(self, seconds: float) -> None:
        """Count one operation."""
        passed = max(0, round(seconds * _NS))
        spare = passed.bit_length() - _BITS
        low = passed >> spare << spare if spare > 0 else passed
        self.bins[low] = self.bins.get(low, 0) + 1
        if passed > self.max_ns:
            self.max_ns = passed

    def add(self, counts: _Counts) -> None:
        """Count the operations of `counts` too."""
        for low, operations in counts.bins.items():
            self.bins[low] = self.bins.get(low, 0) + operations
        self.max_ns = max(self.max_ns, counts.max_ns)


def add_latencies(into: dict[str, LatencyCounter], more: Mapping[str, _Counts]) -> None:
    """Add the latencies of each kind of operation to those in `into`."""
    for name, counts in more.items():
        into.setdefault(name, LatencyCounter()).add(counts)


def _width(low: int) -> int:
    """Return the width of the bin that begins at `low`."""
    return 1 << max(0, low.bit_length() - _BITS)
