"""Rate per writer: every sample a dot, the median with its interval, and fio's ceiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from iobench.report.grid import Grid
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow, in_gib_per_s
from iobench.report.page.theme import INK, MUTED, data_of, spec_of
from iobench.results.setting import at_target

__all__ = ["TOOLTIP", "rates_chart"]

_ROW = 46  # pixels
_HEAD = 0.5  # rows above the first one, for the label of the ceiling
_LABEL, _DOTS, _SPREAD = 0.28, 0.68, 0.13  # within a row; dots alternate above and below the line
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


def rates_chart(group: Group, ceiling_bytes_per_s: float | None, *, headline: str = "") -> Chart:
    """Return the chart of the rates of one operation, fastest first.

    Rows that cannot win have hollow dots. They do not widen the axis: what does not store
    anything may be a hundred times faster.
    """
    ceiling = None if ceiling_bytes_per_s is None else in_gib_per_s(ceiling_bytes_per_s)
    most = _most(group, ceiling)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[0, most], nice=False, zero=True, clamp=True),
        axis=alt.Axis(title="GiB/s", tickCount=6),
    )
    down = alt.Scale(domain=[-_HEAD, len(group.rows)], reverse=True)
    y, label_y = alt.Y("y:Q", scale=down, axis=None), alt.Y("label_y:Q", scale=down, axis=None)
    layers = [*_ceiling_layers(ceiling, most, x, y), *_row_layers(group, x, y, label_y)]
    return Chart(
        name=_slug(f"rate {group.name}"),
        title=f"Rate of each {group.name}",
        headline=headline,
        alt=_alt(group, ceiling),
        caption=_caption(group, ceiling),
        spec=spec_of(alt.layer(*layers), round(_ROW * (len(group.rows) + _HEAD))),
        numbers=_numbers(group),
    )


def _row_layers(group: Group, x: alt.X, y: alt.Y, label_y: alt.Y) -> Iterator[alt.Chart]:
    rows = data_of(_row_values(group))
    dots = data_of(_dot_values(group))
    colour = alt.Color("colour:N", scale=None)
    yield (
        alt.Chart(rows)
        .mark_bar(height=10, opacity=0.3, cornerRadius=3)
        .transform_filter("isValid(datum.x2)")
        .encode(x=x, x2="x2:Q", y=y, color=colour)
    )
    yield (
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
    medians = alt.Chart(rows).transform_calculate(x="datum.median")
    yield medians.mark_tick(thickness=3, size=24, color=INK, orient="vertical").encode(x=x, y=y)
    texts = alt.Chart(rows).encode(y=label_y)
    yield texts.mark_text(align="left", fontWeight=600, limit=290, color=INK).encode(
        text="label:N", x=alt.value(0)
    )
    yield texts.mark_text(align="right", color=INK).encode(text="figure:N", x=alt.value("width"))


def _ceiling_layers(ceiling: float | None, most: float, x: alt.X, y: alt.Y) -> Iterator[alt.Chart]:
    if ceiling is None:
        return
    right = ceiling > most / 2  # the text is left of the line then
    base = alt.Chart(data_of([{"x": ceiling, "y": -_HEAD / 2, "label": f"fio {ceiling:.2f}"}]))
    yield base.mark_rule(color=MUTED, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x)
    yield base.mark_text(
        align="right" if right else "left", dx=-6 if right else 6, color=MUTED
    ).encode(x=x, y=y, text="label:N")


def _row_values(group: Group) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(group.rows):
        one = row.summary
        low, high = (
            map(in_gib_per_s, one.ci95_bytes_per_s) if one.ci95_bytes_per_s else (None, None)
        )
        yield {
            "y": position + _DOTS,
            "label_y": position + _LABEL,
            "x": low,
            "x2": high,
            "median": in_gib_per_s(one.median_bytes_per_s),
            "colour": row.colour,
            "label": _label(group, row),
            "figure": _figure(row),
        }


def _dot_values(group: Group) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(group.rows):
        for number, (sample, rate) in enumerate(zip(row.samples, row.rates, strict=True)):
            yield {
                "x": rate,
                "y": position + _DOTS + (-_SPREAD if number % 2 else _SPREAD),
                "colour": row.colour,
                "fill": row.colour if row.counts else "transparent",
                "shape": row.shape,
                **row.words(sample),
            }


def _label(group: Group, row: RunRow) -> str:
    return row.summary.label.replace(at_target("", group.target), "")


def _figure(row: RunRow) -> str:
    rate = f"{in_gib_per_s(row.summary.median_bytes_per_s):.2f} GiB/s"
    return rate if row.counts else f"{row.summary.verdict}, {rate}"


def _most(group: Group, ceiling: float | None) -> float:
    shown = [row for row in group.rows if row.counts] or group.rows
    rates = [rate for row in shown for rate in row.rates]
    return _MARGIN * max([*rates, ceiling or 0.0])


def _alt(group: Group, ceiling: float | None) -> str:
    rows = "; ".join(f"{_label(group, row)} {_figure(row)}" for row in group.rows)
    fio = "" if ceiling is None else f" fio reaches {ceiling:.2f} GiB/s."
    return f"Median rate of each {group.name}, fastest first: {rows}.{fio}"


def _caption(group: Group, ceiling: float | None) -> str:
    parts = [f"One dot per {group.operation}; the line is the median, the bar its interval."]
    if any(row.shape != group.rows[0].shape for row in group.rows):
        parts.append("Diamonds are other projects.")
    if ceiling is not None:
        parts.append("Dashed: fio, the best of several jobs on the same directory.")
    if not all(row.counts for row in group.rows):
        parts.append("Hollow dots do not count; beyond the axis they are at its end.")
    return " ".join(parts)


def _numbers(group: Group) -> Grid:
    rows = []
    for row in group.rows:
        low_high = row.summary.ci95_bytes_per_s
        rows.append(
            [
                _label(group, row),
                f"{in_gib_per_s(row.summary.median_bytes_per_s):.3f}",
                " to ".join(f"{in_gib_per_s(one):.3f}" for one in low_high) if low_high else "-",
                " ".join(f"{rate:.3f}" for rate in row.rates),
                row.summary.verdict,
            ]
        )
    columns = (
        ("writer", False),
        ("median, GiB/s", True),
        ("interval", True),
        ("samples in the order of repetitions", False),
        ("verdict", False),
    )
    return Grid(columns=columns, rows=rows)


def _slug(text: str) -> str:
    return "-".join(
        "".join(c if c.isascii() and c.isalnum() else " " for c in text).split()
    ).lower()
