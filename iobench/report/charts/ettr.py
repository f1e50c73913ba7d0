"""ETTR against the interval between two saves, and at the best interval against the job's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np

from iobench.goodput import goodput
from iobench.goodput.forecast import Forecast
from iobench.report.document import Chart
from iobench.report.grid import Grid
from iobench.report.page.theme import INK, data_of, spec_of
from iobench.report.palette import colour_of
from iobench.units import format_seconds

__all__ = ["interval_chart", "nodes_chart"]

_POINTS = 60
_AROUND = 20.0  # times the shortest and the longest best interval
_LOWEST = 0.05  # the axis begins above it where no curve goes below
_HEIGHT, _DASH = 300, {"sync": [1, 0], "async": [6, 3]}
_TOOLTIP = [
    alt.Tooltip(f"{name}:N", title=title)
    for name, title in (("who", "writer"), ("when", "save every"), ("figure", "ETTR"))
]


def interval_chart(forecasts: Sequence[Forecast], numbers: Grid, *, name: str) -> Chart:
    """Return the chart of one job: a curve for each way to save, with its best interval."""
    job = forecasts[0].job
    best = [one.best.interval_s for one in forecasts]
    low, high = min(best) / _AROUND, max(best) * _AROUND
    lines = [row for one in forecasts for row in _curve(one, low, high)]
    points = [_point(one) for one in forecasts]
    unit, seconds = _unit(float(np.sqrt(low * high)))
    ticks = _ticks(low / seconds, high / seconds)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", domain=[low / seconds, high / seconds], nice=False),
        axis=alt.Axis(title=f"training time between two saves, {unit}", values=ticks, format="~r"),
    )
    for row in (*lines, *points):
        row["x"] /= seconds
    least = min(row["y"] for row in points)
    floor = max(0.0, 1 - 4 * (1 - least))  # the curves fall to 0 on both sides
    layers = _layers(lines, points, x, floor if floor > _LOWEST else 0.0)
    spoken = "; ".join(f"{_who(one)} {one.best.ettr:.4f} every {_every(one)}" for one in forecasts)
    return Chart(
        name=name,
        title=f"ETTR on {job.nodes:,} nodes, by how often a checkpoint is saved",
        alt=f"Highest effective training time ratio (ETTR): {spoken}.",
        caption=f"ETTR: the part of the time that trains. A failure every "
        f"{format_seconds(job.mtbf_s)}. The dot is the best interval; left of it saves cost more, "
        "right of it failures do.",
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=numbers,
    )


def nodes_chart(forecasts: Sequence[Forecast], numbers: Grid) -> Chart:
    """Return the chart of ETTR at the best interval, for jobs of several sizes."""
    rows = [
        {"x": one.job.nodes, "y": one.best.ettr, **_words(one, one.best.interval_s, one.best.ettr)}
        for one in forecasts
    ]
    nodes = sorted({one.job.nodes for one in forecasts})
    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", domain=[nodes[0], nodes[-1]], nice=False, padding=12),
        axis=alt.Axis(title="nodes", values=nodes, format=","),
    )
    least = min(one.best.ettr for one in forecasts)
    layers = _layers(rows, rows, x, max(0.0, least - 0.25 * (1 - least)))
    first, last = (
        max((o for o in forecasts if o.job.nodes == count), key=lambda one: one.best.ettr)
        for count in (nodes[0], nodes[-1])
    )
    return Chart(
        name="ettr-nodes",
        title="ETTR at the best interval, by the size of the job",
        alt=f"{first.job.nodes:,} nodes: {first.best.ettr:.4f} with {_who(first)}; "
        f"{last.job.nodes:,} nodes: {last.best.ettr:.4f} with {_who(last)}.",
        caption="ETTR: the part of the time that trains.",
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=numbers,
    )


def _layers(
    lines: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]], x: alt.X, floor: float
) -> Iterator[alt.Chart]:
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=[floor, 1.0], nice=False, clamp=True),
        axis=alt.Axis(title="ETTR", tickCount=5),
    )
    names = dict.fromkeys((row["who"], row["colour"], row["mode"]) for row in lines)
    colour = alt.Color(
        "who:N",
        scale=alt.Scale(domain=[n for n, _, _ in names], range=[c for _, c, _ in names]),
    )
    shown = [row for row in lines if row["y"] >= floor]
    line = alt.Chart(data_of(shown)).mark_line(strokeWidth=2, clip=True)
    dash = alt.StrokeDash("mode:N", scale=alt.Scale(domain=[*_DASH], range=[*_DASH.values()]))
    yield line.encode(x=x, y=y, color=colour, strokeDash=dash.legend(None))
    dot = alt.Chart(data_of(points)).mark_point(
        size=90, filled=True, opacity=1, stroke=INK, strokeWidth=1
    )
    yield dot.encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)


def _curve(one: Forecast, low: float, high: float) -> Iterator[dict[str, Any]]:
    """Yield ETTR from `low` to `high` seconds, not below the interval at which saves wait."""
    costs = one.candidate.costs
    start = max(low, goodput.shortest(costs))
    if start >= high:
        return
    for interval_s in np.geomspace(start, high, _POINTS).tolist():
        ettr = goodput.ettr(interval_s, costs, one.job)
        yield {"x": interval_s, "y": ettr, **_words(one, interval_s, ettr)}


def _point(one: Forecast) -> dict[str, Any]:
    best = one.best
    return {"x": best.interval_s, "y": best.ettr, **_words(one, best.interval_s, best.ettr)}


def _words(one: Forecast, interval_s: float, ettr: float) -> dict[str, str]:
    name = one.candidate.name.split()[0]
    return {
        "who": _who(one),
        "mode": one.candidate.mode,
        "colour": colour_of(name if one.candidate.mode == "sync" else f"{name} async"),
        "when": format_seconds(interval_s),
        "figure": f"{ettr:.4f}",
    }


def _who(one: Forecast) -> str:
    return f"{one.candidate.name} {one.candidate.mode}"


def _every(one: Forecast) -> str:
    return format_seconds(one.best.interval_s)


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit of an axis around `seconds`, and its seconds."""
    return next(one for one in _UNITS if seconds < 120 * one[1] or one is _UNITS[-1])


_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from `low` to `high`."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [t for p in powers for t in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if low <= t <= high]
