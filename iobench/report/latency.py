"""Latencies of the operations of a row, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from iobench.report.grid import Grid
from iobench.results import Sample
from iobench.writers.latency import Latency, LatencyFigures

if TYPE_CHECKING:
    from iobench.report.row import Summary

__all__ = ["latencies_of", "latency_grid"]

_NAMES = {
    "write": "block write",
    "read": "block read",
    "sync": "sync",
    "batch sync": "sync of a batch",
    "upload": "part upload",
}
_MISSING = "-"


def latencies_of(samples: Sequence[Sample]) -> dict[str, LatencyFigures]:
    """Return the figures of each kind of operation; those of all samples are pooled."""
    names = dict.fromkeys(name for sample in samples for name in sample.latencies)
    totals = {
        name: Latency.total(one.latencies[name] for one in samples if name in one.latencies)
        for name in names
    }
    return {name: LatencyFigures.of(one) for name, one in totals.items() if one.count}


def latency_grid(summaries: Iterable[Summary]) -> Grid:
    """Return the table of latencies in milliseconds."""
    rows = [
        [
            summary.label,
            summary.operation,
            _NAMES.get(name, name),
            f"{one.operations:,}",
            *map(_ms, (one.p50_s, one.p95_s, one.p99_s, one.p99_9_s, one.max_s)),
        ]
        for summary in summaries
        for name, one in summary.latencies.items()
    ]
    figures = ("operations", "p50\n(ms)", "p95\n(ms)", "p99\n(ms)", "p99.9\n(ms)", "max\n(ms)")
    columns = (("writer", False), ("operation", False), ("latency of", False))
    return Grid(
        title="latencies",
        columns=(*columns, *((name, True) for name in figures)),
        rows=rows,
        drop=(5, 3),
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _MISSING
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
