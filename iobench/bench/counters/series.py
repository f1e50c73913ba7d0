"""Series: bytes per 100 ms of one timed operation, from the start of its clock to the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from iobench.bench.counters.monitor import Counted
from iobench.results.records import Operation, Series
from iobench.writers.transfer import TICK_S

INTERVAL_S = 0.1


def make_series(operation: Operation, counted: Counted, ticks: Mapping[int, int] | None) -> Series:
    """Return the series of the operation that `counted` measured.

    `ticks` are the bytes that its writer completed (see `Transfer.completed`); None for a writer
    that does not count them.
    """
    growth, grown = counted.growth, None
    if growth is not None:
        grown = by_growth(
            [
                (one.at_s, one.write_bytes if operation == "save" else one.read_bytes)
                for one in growth.readings
            ]
        )
    return Series(
        interval_s=INTERVAL_S,
        completed=None if ticks is None else by_ticks(ticks, counted.began_s, counted.elapsed_s),
        counter=growth.source if growth is not None else None,
        counted=grown,
    )


def by_growth(points: Sequence[tuple[float, int]]) -> tuple[int, ...]:
    """Return the growth of a counter in each interval, from (seconds, growth) since the start.

    The last point is the end. Between two points the growth is interpolated linearly.
    """
    elapsed_s = points[-1][0]
    times, grown = zip((0.0, 0), *points, strict=True)
    ends = [min(i * INTERVAL_S, elapsed_s) for i in range(_count(elapsed_s) + 1)]
    at_ends = np.rint(np.interp(ends, times, grown)).astype(np.int64)
    return tuple(int(growth) for growth in np.diff(at_ends))


def by_ticks(ticks: Mapping[int, int], began_s: float, elapsed_s: float) -> tuple[int, ...]:
    """Return the bytes of `ticks` in each interval of `elapsed_s` seconds since `began_s`.

    Raises ValueError for bytes before the clock began or after its end.
    """
    bins = [0] * _count(elapsed_s)
    for tick, moved in ticks.items():
        begin_s = tick * TICK_S - began_s
        if not -TICK_S <= begin_s <= elapsed_s:
            raise ValueError(f"{moved} bytes at {begin_s:.3f} s of a clock of {elapsed_s:.3f} s")
        bins[min(max(int(begin_s / INTERVAL_S), 0), len(bins) - 1)] += moved
    return tuple(bins)


def _count(elapsed_s: float) -> int:
    return max(1, math.ceil(elapsed_s / INTERVAL_S))
