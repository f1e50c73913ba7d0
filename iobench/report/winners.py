"""Winners: the fastest contender of a run for each operation, and its lead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench.bench.judging.comparison import (
    LEAST_FLOOR,
    Finding,
    compare_paired,
    fastest,
    noise_floor,
    rates_by_repetition,
)
from iobench.bench.judging.verdict import VerdictStatus
from iobench.report.baseline import is_contender
from iobench.report.row import Summary
from iobench.results import Operation, Sample

__all__ = ["RANKED", "Winner", "find_winners"]

RANKED = (VerdictStatus.VALID, VerdictStatus.SCALED)
"""Verdicts of the figures that can win."""

_REFERENCE = "buffered"  # what most frameworks do by default

_Row = tuple[Summary, Sequence[Sample]]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest contender of one operation. The `label` of its summary names a contender.

    Full restores and each kind of partial restore (`restore_as`) have a winner each.

    `equals` are the contenders for which no difference from the fastest is shown; it is empty if
    the fastest won. `floor` is the part up to which a difference is noise; `measured` says whether
    this run's A/A measured it. `repetitions` counts the repetitions of the fastest.

    `reference` is a contender that the fastest is shown to be faster than: the baseline,
    `buffered`, or the slowest. `ratio` is the rate of the fastest over that of `reference`, paired
    by repetition, and `ratio_ci95` its 95% interval.
    """

    operation: Operation
    restore_as: str | None = None
    fastest: str
    equals: tuple[str, ...]
    floor: float
    measured: bool
    repetitions: int
    reference: str | None = None
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None


def find_winners(rows: Sequence[_Row], baseline: Mapping[str, Any] | None) -> Iterator[Winner]:
    """Yield the winner of each operation that has several ranked contenders or an A/A.

    `rows` are summaries with their samples; `baseline` is the contender of the run's plan.
    """
    kinds = dict.fromkeys((summary.operation, summary.axes.restore_as) for summary, _ in rows)
    for operation, restore_as in sorted(kinds, key=lambda kind: (kind[0] != "save", kind[1] or "")):
        ranked = [
            row
            for row in rows
            if (row[0].operation, row[0].axes.restore_as) == (operation, restore_as)
            and row[0].verdict in RANKED
        ]
        if not ranked:
            continue
        measured = noise_floor(sample for _, samples in ranked for sample in samples)
        if len(ranked) == 1 and measured is None:
            continue
        floor = max(measured or 0.0, LEAST_FLOOR)
        best = fastest([samples for _, samples in ranked], floor)
        first = ranked[best.first]
        slower = [row for i, row in enumerate(ranked) if i != best.first and i not in best.equals]
        yield Winner(
            operation=operation,
            restore_as=restore_as,
            fastest=first[0].label,
            equals=tuple(ranked[position][0].label for position in best.equals),
            floor=floor,
            measured=measured is not None,
            repetitions=len(rates_by_repetition(first[1])),
            **_reference(first, slower, baseline, floor),
        )


def _reference(
    first: _Row, slower: Sequence[_Row], baseline: Mapping[str, Any] | None, floor: float
) -> dict[str, Any]:
    """Compare the fastest with one of `slower`; return fields of `Winner`, or {} without any."""
    if not slower:
        return {}
    chosen = min(slower, key=lambda row: row[0].median_bytes_per_s)
    chosen = next((row for row in slower if row[0].writer == _REFERENCE), chosen)
    if baseline is not None:
        chosen = next((row for row in slower if is_contender(row[1][0], baseline)), chosen)
    difference = compare_paired(first[1], chosen[1], floor)
    assert difference is not None, "a contender that is slower has common repetitions"
    assert difference.finding is Finding.BETTER
    interval = difference.ratio.interval
    return {
        "reference": chosen[0].label,
        "ratio": difference.ratio.ratio,
        "ratio_ci95": (interval.low, interval.high) if interval else None,
    }
