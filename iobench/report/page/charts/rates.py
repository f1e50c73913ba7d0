"""Rate per writer: every sample a dot, the median with its interval, and fio's ceiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from iobench.bench.judging.stats import interval_heading
from iobench.report.grid import Grid
from iobench.report.page.charts.lanes import (
    BODY,
    label_layers,
    lane_axis,
    lane_height,
    lane_scale,
)
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow, in_gib_per_s
from iobench.report.page.theme import INK, MUTED, data_of, spec_of

__all__ = ["TOOLTIP", "highest", "rates_chart"]

_HEAD = 0.5  # lanes above the first one, for the label of the ceiling
_SPREAD = 0.12  # lanes: dots alternate above and below the middle, so that fewer hide others
_MARGIN = 1.06  # of the axis, beyond the largest figure

TOOLTIP = [
    alt.Tooltip(f"{name}:N", title=title)
    for name, title in (
        ("writer", "writer"),
        ("repetition", "repetition"),
        ("rate", "rate"),
        ("time", "time"),
        ("verdict", "verdict"),
        ("others", "others meanwhile"),
    )
]
"""What a sample says when the pointer is on it: the fields of `RunRow.words`."""


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
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[0, most], nice=False, zero=True, clamp=True),
        axis=alt.Axis(title="GiB/s", tickCount=6),
    )
    head = 0.0 if ceiling is None else _HEAD
    down = lane_scale(len(group.rows), head)
    layers = [
        *_ceiling_layers(ceiling, most, x, down),
        *_row_layers(group, x, lane_axis("y", down)),
        *label_layers([(group.label(row), _figure(row)) for row in group.rows], down),
    ]
    return Chart(
        name=group.slug("rate"),
        title=f"Rate of each {group.name}",
        headline=headline,
        alt=_alt(group, ceiling),
        caption=_caption(group, ceiling),
        spec=spec_of(alt.layer(*layers), lane_height(len(group.rows), head)),
        numbers=_numbers(group),
    )


def _row_layers(group: Group, x: alt.X, y: alt.Y) -> Iterator[alt.Chart]:
    rows, dots = data_of(_row_values(group)), data_of(_dot_values(group))
    colour = alt.Color("colour:N", scale=None)
    yield (
        alt.Chart(rows)
        .mark_bar(height=10, opacity=0.3, cornerRadius=3)
        .transform_filter("isValid(datum.x2)")
        .encode(x=x, x2="x2:Q", y=y, color=colour)
    )
    medians = alt.Chart(rows).transform_calculate(x="datum.median")
    yield medians.mark_tick(thickness=3, size=24, color=INK, orient="vertical").encode(x=x, y=y)
    yield (  # above the median, which would keep the pointer from the sample below it
        alt.Chart(dots)
        .mark_point(size=52, opacity=0.85, strokeWidth=1.4)
        .encode(
            x=x,
            y=y,
            color=colour,
            fill=alt.Fill("fill:N", scale=None),
            shape=alt.Shape("shape:N", scale=None),
            tooltip=TOOLTIP,
        )
    )


def _ceiling_layers(
    ceiling: float | None, most: float, x: alt.X, down: alt.Scale
) -> Iterator[alt.Chart]:
    if ceiling is None:
        return
    left = ceiling > most / 2  # of the line: where the text has room
    base = alt.Chart(data_of([{"x": ceiling, "y": -_HEAD / 2, "label": f"fio {ceiling:.2f}"}]))
    yield base.mark_rule(color=MUTED, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x)
    text = base.mark_text(align="right" if left else "left", dx=-7 if left else 7, color=MUTED)
    yield text.encode(x=x, y=lane_axis("y", down), text="label:N")


def _row_values(group: Group) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(group.rows):
        interval = row.summary.ci95_bytes_per_s
        low, high = map(in_gib_per_s, interval) if interval else (None, None)
        yield {
            "y": position + BODY,
            "x": low,
            "x2": high,
            "median": row.median,
            "colour": row.colour,
        }


def _dot_values(group: Group) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(group.rows):
        for number, (sample, rate) in enumerate(zip(row.samples, row.rates, strict=True)):
            yield {
                "x": rate,
                "y": position + BODY + (-_SPREAD if number % 2 else _SPREAD),
                "colour": row.colour,
                "fill": row.colour if row.counts else "transparent",
                "shape": row.shape,
                **row.words(sample),
            }


def _figure(row: RunRow) -> str:
    rate = f"{row.median:.2f} GiB/s"
    return rate if row.counts else f"{row.summary.verdict}, {rate}"


def highest(group: Group) -> float:
    """Return the highest rate in GiB/s of a sample that counts, or of any where none does."""
    shown = [row for row in group.rows if row.counts] or group.rows
    return max(rate for row in shown for rate in row.rates)


def _alt(group: Group, ceiling: float | None) -> str:
    rows = "; ".join(f"{group.label(row)} {_figure(row)}" for row in group.rows)
    fio = "" if ceiling is None else f" fio reaches {ceiling:.2f} GiB/s."
    return f"Median rate of each {group.name}, fastest first: {rows}.{fio}"


def _caption(group: Group, ceiling: float | None) -> str:
    interval = interval_heading(row.summary.samples for row in group.rows).replace("\n", " ")
    parts = [f"One dot per {group.operation}; upright line: median; bar: its {interval}."]
    if any(row.shape != group.rows[0].shape for row in group.rows):
        parts.append("Diamonds are other projects.")
    if ceiling is not None:
        parts.append("Dashed: the best fio job in the same directory.")
    if not all(row.counts for row in group.rows):
        parts.append("Hollow dots do not count; beyond the axis they are at its end.")
    return " ".join(parts)


def _numbers(group: Group) -> Grid:
    columns = (
        ("writer", False),
        ("median, GiB/s", True),
        ("interval", True),
        ("samples in the order of repetitions", False),
        ("verdict", False),
    )
    rows = [
        [
            group.label(row),
            f"{row.median:.3f}",
            _interval(row),
            " ".join(f"{rate:.3f}" for rate in row.rates),
            row.summary.verdict,
        ]
        for row in group.rows
    ]
    return Grid(columns=columns, rows=rows, sentences=(3,))


def _interval(row: RunRow) -> str:
    interval = row.summary.ci95_bytes_per_s
    return " to ".join(f"{in_gib_per_s(one):.3f}" for one in interval) if interval else "-"
