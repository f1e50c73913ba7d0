"""Where the time goes: the phases of each writer, stacked, in seconds of its median sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import altair as alt

from iobench.report.charts.spread import (
    BODY,
    label_layers,
    lane_axis,
    lane_height,
    lane_scale,
)
from iobench.report.document import Chart
from iobench.report.page.theme import GRID, INK, MUTED, data_of, spec_of
from iobench.report.palette import PHASES, phase_colour
from iobench.report.rows import Group, RunRow
from iobench.report.wording import phases_grid
from iobench.units import format_seconds

__all__ = ["phases_chart"]

_REST = "not in a phase"
_LEAST_REST = 0.02  # of the time: less is the difference of medians
_OVERLAP = 1.05  # of the time, in all phases: more means that they overlap


def phases_chart(group: Group) -> Chart:
    """Return the chart of the phases of one operation, in the order of the rates."""
    down = lane_scale(len(group.rows))
    y = lane_axis("y", down)
    x = alt.X(
        "x:Q", scale=alt.Scale(zero=True, nice=False), axis=alt.Axis(title="seconds", tickCount=6)
    )
    values = [value for row in enumerate(group.rows) for value in _values(*row)]
    bars = alt.Chart(data_of(values)).mark_bar(height=16)
    ends = alt.Chart(
        data_of({"y": n + BODY, "x": row.summary.last_done_s} for n, row in enumerate(group.rows))
    )
    layers = [
        bars.encode(x=x, x2="x2:Q", y=y, color=_colour(values), tooltip=_TOOLTIP),
        ends.mark_tick(thickness=3, size=24, color=INK, orient="vertical").encode(x=x, y=y),
        *label_layers(
            [(group.label(row), f"{row.summary.last_done_s:.2f} s") for row in group.rows],
            down,
        ),
    ]
    return Chart(
        name=group.slug("phases"),
        title=f"Where the time of each {group.name} goes",
        alt=_alt(group),
        caption=_caption(group),
        spec=spec_of(alt.layer(*layers), lane_height(len(group.rows))),
        numbers=phases_grid(row.summary for row in group.rows),
    )


_TOOLTIP = [alt.Tooltip("phase:N", title="phase"), alt.Tooltip("time:N", title="time")]


def _colour(values: list[dict[str, Any]]) -> alt.Color:
    found = dict.fromkeys(value["phase"] for value in values)
    phases = _in_order(found)
    colours = [GRID if one == _REST else phase_colour(one) for one in phases]
    scale = alt.Scale(domain=phases, range=colours)
    return alt.Color("phase:N", scale=scale, legend=alt.Legend(title=None, labelColor=MUTED))


def _in_order(phases: Iterable[str]) -> list[str]:
    """Return the phases in the order of PHASES, then the others."""
    known = list(PHASES)
    return sorted(phases, key=lambda one: known.index(one) if one in PHASES else len(known))


def _values(position: int, row: RunRow) -> Iterator[dict[str, Any]]:
    """Yield the phases of a row from left to right, and the rest of its time."""
    total_s, begin_s = row.summary.last_done_s, 0.0
    rest_s = total_s - sum(row.summary.phases_s.values())
    parts = [(one, row.summary.phases_s[one]) for one in _in_order(row.summary.phases_s)]
    if rest_s > _LEAST_REST * total_s:
        parts.append((_REST, rest_s))
    for phase, seconds in parts:
        yield {
            "y": position + BODY,
            "x": begin_s,
            "x2": begin_s + seconds,
            "phase": phase,
            "time": f"{format_seconds(seconds)}, {_share(seconds, total_s)}",
        }
        begin_s += seconds


def _share(seconds: float, total_s: float) -> str:
    return f"{100 * seconds / total_s:.0f}%"


def _alt(group: Group) -> str:
    rows = []
    for row in group.rows:
        phase, seconds = max(row.summary.phases_s.items(), key=lambda one: one[1], default=("", 0))
        share = f", {_share(seconds, row.summary.last_done_s)} of it in {phase}" if phase else ""
        rows.append(f"{group.label(row)} {format_seconds(row.summary.last_done_s)}{share}")
    return f"Median time of each {group.name} by phase: {'; '.join(rows)}."


def _caption(group: Group) -> str:
    text = "Medians of the phases; the upright line is the median of the whole time."
    over = any(
        sum(row.summary.phases_s.values()) > _OVERLAP * row.summary.last_done_s
        for row in group.rows
    )
    return f"{text} Phases beyond it overlap others." if over else text
