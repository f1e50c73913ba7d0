"""Rates of several records: a column per record, a colour per writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from iobench.report.grid import Grid
from iobench.report.page.charts.in_order import TOOLTIP
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow
from iobench.report.page.theme import INK, data_of, spec_of

__all__ = ["by_record_chart", "letter"]

_HEIGHT = 340
_ROOM = 0.86  # of a column, for its writers
_MARGIN = 1.06


def letter(position: int) -> str:
    """Return the name of a record in a page of several: A to Z, then numbers."""
    return chr(ord("A") + position) if position < 26 else str(position + 1)


def by_record_chart(groups: Sequence[Group | None]) -> Chart:
    """Return the chart of one operation in several records, at least one of which has it.

    `groups` has None for a record without this operation. Rows that cannot win are left out.
    """
    shown = [(column, group) for column, group in enumerate(groups) if group]
    first = shown[0][1]
    rows = list(_placed(shown))
    colours = {first.label(row): row.colour for _, _, row in rows}
    medians: list[dict[str, Any]] = [
        {
            "x": x,
            "y": row.median,
            "record": letter(column),
            "label": first.label(row),
        }
        for column, x, row in rows
    ]
    dots = [dot for column, x, row in rows for dot in _dots(column, x, row, first.label(row))]
    across = _across(len(groups))
    most = _MARGIN * max((dot["y"] for dot in dots), default=1.0)
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=[0, most], nice=False),
        axis=alt.Axis(title="GiB/s", tickCount=6),
    )
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    points = alt.Chart(data_of(dots)).mark_point(size=46, filled=True, opacity=0.8)
    lines = alt.Chart(data_of(medians)).mark_tick(
        thickness=3, size=18, color=INK, orient="horizontal"
    )
    layers = [
        lines.encode(x=across, y=y),
        points.encode(
            x=across,
            y=y,
            color=alt.Color("label:N", scale=scale, legend=alt.Legend(title=None)),
            shape=alt.Shape("shape:N", scale=None),
            tooltip=[alt.Tooltip("record:N", title="record"), *TOOLTIP],
        ),
    ]
    return Chart(
        name=first.slug("by-record"),
        title=f"Rate of each {first.name}, by record",
        alt=f"Median rates of each {first.name}: "
        + "; ".join(f"{one['record']}: {one['label']} {one['y']:.2f} GiB/s" for one in medians)
        + ".",
        caption=f"A column per record, a colour per writer, a dot per {first.operation}; the line "
        "is the median.",
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=Grid(
            columns=(("record", False), ("writer", False), ("median, GiB/s", True)),
            rows=[[one["record"], one["label"], f"{one['y']:.3f}"] for one in medians],
        ),
    )


def _across(columns: int) -> alt.X:
    """Return the encoding of x: a letter below each column."""
    letters = [letter(column) for column in range(columns)]
    axis = alt.Axis(
        title=None,
        values=list(range(columns)),
        labelExpr=f"{letters}[datum.value]",  # our letters, no text of a record
        labelFontSize=14,
        grid=False,
    )
    scale = alt.Scale(domain=[-0.5, columns - 0.5], nice=False, zero=False)
    return alt.X("x:Q", scale=scale, axis=axis)


def _placed(shown: Sequence[tuple[int, Group]]) -> Iterator[tuple[int, float, RunRow]]:
    """Yield each row that can win with its column and its place on the x axis, around the column.

    The distance between rows is the same in all columns.
    """
    rows = [(column, [row for row in group.rows if row.counts]) for column, group in shown]
    step = _ROOM / max(4, *(len(found) for _, found in rows))
    for column, found in rows:
        for number, row in enumerate(found):
            yield column, column + step * (number - (len(found) - 1) / 2), row


def _dots(column: int, x: float, row: RunRow, label: str) -> Iterator[dict[str, Any]]:
    for sample, rate in zip(row.samples, row.rates, strict=True):
        yield {
            "x": x,
            "y": rate,
            "record": letter(column),
            "label": label,
            "shape": row.shape,
            **row.words(sample),
        }
