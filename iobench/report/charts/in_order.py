"""Samples in the order in which they ran: drift, throttling and burst credits are seen here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import altair as alt

from iobench.report.document import Chart
from iobench.report.grid import Grid
from iobench.report.page.theme import data_of, spec_of
from iobench.report.rows import SAMPLE_HEADINGS, Group, in_gib_per_s

__all__ = ["TOOLTIP", "in_order_chart"]

TOOLTIP = [alt.Tooltip(f"{name}:N", title=title) for name, title in SAMPLE_HEADINGS.items()]
"""For data that has the fields of `RunRow.words`."""

_X_TITLE, _Y_TITLE = "minutes since the start of the run", "GiB/s"
_HEIGHT = 280
_MARGIN = 1.06


def in_order_chart(group: Group, started_at: str) -> Chart:
    """Return the chart of all samples of one operation over the time of the run."""
    shown = [row for row in group.rows if row.counts] or group.rows
    values = list(_values(group, started_at))
    most = _MARGIN * max(rate for row in shown for rate in row.rates)
    labels = list(dict.fromkeys(value["label"] for value in values))
    colours = {value["label"]: value["colour"] for value in values}
    scale = alt.Scale(domain=labels, range=[colours[label] for label in labels])
    base = alt.Chart(data_of(values)).encode(
        x=alt.X("x:Q", axis=alt.Axis(title=_X_TITLE, tickCount=8)),
        y=alt.Y(
            "y:Q",
            axis=alt.Axis(title=_Y_TITLE, tickCount=5),
            scale=alt.Scale(domain=[0, most], nice=False, clamp=True),
        ),
        color=alt.Color("label:N", scale=scale, legend=alt.Legend(title=None)),
    )
    dots = base.mark_point(size=46, filled=True, opacity=0.9).encode(
        shape=alt.Shape("shape:N", scale=None), tooltip=TOOLTIP
    )
    layers = [base.mark_line(opacity=0.75, strokeWidth=1.5), dots, *_changes(group, started_at)]
    return Chart(
        name=group.slug("in-order"),
        title=f"Each {group.name} in the order in which they ran",
        alt=f"Rates of {len(values)} samples over the time of the run: {_ends(group)}.",
        caption="A slope is drift: a full write cache, throttling or used up burst credits. A dip "
        "of all writers at once is the machine or another user of it."
        + (
            " Dashed: the rates before and after a change that is shown." if len(layers) > 2 else ""
        ),
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=_numbers(values),
    )


def _changes(group: Group, started_at: str) -> list[alt.Chart]:
    """Return the layer of the rates before and after the changes of rows; none without a change."""
    steps = list(_steps(group, started_at))
    if not steps:
        return []
    # Layers with other titles would have both.
    x, y = alt.X("x:Q", title=_X_TITLE), alt.Y("y:Q", title=_Y_TITLE)
    lines = alt.Chart(data_of(steps)).mark_rule(strokeWidth=2.5, strokeDash=[7, 4])
    return [lines.encode(x=x, x2="x2:Q", y=y, y2="y2:Q", color="label:N")]


def _steps(group: Group, started_at: str) -> Iterator[dict[str, Any]]:
    """Yield the three lines of each change: the rate before it, the step, and the rate after it."""
    began = datetime.fromisoformat(started_at)
    first = min(datetime.fromisoformat(s.started_at) for row in group.rows for s in row.samples)
    start = (first - began).total_seconds() / 60
    for row in group.rows:
        over_time = row.summary.over_time
        if over_time is None or over_time.change is None:
            continue
        change = over_time.change
        at, end = start + change.at_s / 60, start + over_time.elapsed_s / 60
        before = in_gib_per_s(change.before_bytes_per_s)
        after = in_gib_per_s(change.after_bytes_per_s)
        for x, x2, y, y2 in (
            (start, at, before, before),
            (at, at, before, after),
            (at, end, after, after),
        ):
            yield {"x": x, "x2": x2, "y": y, "y2": y2, "label": group.label(row)}


def _values(group: Group, started_at: str) -> Iterator[dict[str, Any]]:
    began = datetime.fromisoformat(started_at)
    for row in group.rows:
        for sample, rate in zip(row.samples, row.rates, strict=True):
            passed = datetime.fromisoformat(sample.started_at) - began
            yield {
                "x": passed.total_seconds() / 60,
                "y": rate,
                "label": group.label(row),
                "colour": row.colour,
                "shape": row.shape,
                **row.words(sample),
            }


def _ends(group: Group) -> str:
    return "; ".join(
        f"{group.label(row)} from {row.rates[0]:.2f} to {row.rates[-1]:.2f} GiB/s"
        for row in group.rows
    )


def _numbers(values: list[dict[str, Any]]) -> Grid:
    columns = (("minute", True), ("writer", False), ("GiB/s", True), ("others meanwhile", False))
    rows = [
        [f"{one['x']:.2f}", one["label"], f"{one['y']:.3f}", one["others"]]
        for one in sorted(values, key=lambda value: float(value["x"]))
    ]
    return Grid(columns=columns, rows=rows)
