"""Rate per writer: every sample a dot, the median with its interval, and fio's rate."""

from __future__ import annotations

from iobench.report.charts.spread import spread_chart
from iobench.report.document import Chart, Dot, MarkLine, Spread
from iobench.report.rows import SAMPLE_HEADINGS, Group, RunRow, in_gib_per_s
from iobench.stats.estimates import interval_heading

__all__ = ["highest", "rates_chart"]

_MARGIN = 1.06  # of the axis, beyond the largest figure


def rates_chart(
    group: Group,
    ceiling_bytes_per_s: float | None,
    *,
    headline: str = "",
    up_to_gib_per_s: float = 0.0,
) -> Chart:
    """Return the chart of the rates of one operation, fastest first.

    The axis ends at `up_to_gib_per_s` or later: charts to be compared have the same axis.
    Rows that cannot win have hollow dots. They do not widen the axis: what does not store
    anything may be a hundred times faster.
    """
    ceiling = None if ceiling_bytes_per_s is None else in_gib_per_s(ceiling_bytes_per_s)
    most = _MARGIN * max(highest(group), ceiling or 0.0, up_to_gib_per_s)
    rows = [_spread(group, row) for row in group.rows]
    return spread_chart(
        rows,
        name=group.slug("rate"),
        title=f"Rate of each {group.name}",
        headline=headline,
        says=f"Median rate of each {group.name}, fastest first",
        caption=_caption(group, ceiling, most),
        axis="GiB/s",
        mark=None if ceiling is None else MarkLine(x=ceiling, label=f"fio {ceiling:.2f}"),
        ends=(0.0, most),
    )


def highest(group: Group) -> float:
    """Return the highest rate in GiB/s of a sample that counts, or of any where none does."""
    shown = [row for row in group.rows if row.counts] or group.rows
    return max(rate for row in shown for rate in row.rates)


def _spread(group: Group, row: RunRow) -> Spread:
    interval, rate = row.summary.ci95_bytes_per_s, f"{row.median:.2f} GiB/s"
    return Spread(
        label=group.label(row),
        figure=rate if row.counts else f"{row.summary.verdict}, {rate}",
        colour=row.colour,
        shape=row.shape,
        hollow=not row.counts,
        middle=row.median,
        bounds=(in_gib_per_s(interval[0]), in_gib_per_s(interval[1])) if interval else None,
        dots=[
            Dot(x=rate, words={SAMPLE_HEADINGS[n]: text for n, text in row.words(sample).items()})
            for sample, rate in zip(row.samples, row.rates, strict=True)
        ],
    )


def _caption(group: Group, ceiling: float | None, most: float) -> str:
    interval = interval_heading(row.summary.repetitions for row in group.rows).replace("\n", " ")
    parts = [f"One dot per {group.operation}; upright line: median; bar: its {interval}."]
    if any(row.shape != group.rows[0].shape for row in group.rows):
        parts.append("Diamonds are other projects.")
    if ceiling is not None:
        parts.append("Dashed: the best fio job in the same directory.")
    if not all(row.counts for row in group.rows):
        parts.append("Hollow dots do not count.")
    if any(rate > most for row in group.rows for rate in row.rates):
        parts.append("Triangles are beyond the axis.")
    return " ".join(parts)
