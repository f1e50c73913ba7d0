"""Memory fill: the snapshots that are in memory during a block of training, and its stalls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from iobench.report.grid import Grid
from iobench.report.page.charts.timeline import Timeline
from iobench.report.page.page import Chart
from iobench.report.page.theme import data_of, spec_of

__all__ = ["fill_of", "memory_fill_chart"]

_HEIGHT = 220
_STALL = "#d5622a"
_COLOURS = ("#2b7bd0", "#2e9e6b", "#8a5cc2", "#b08900", "#8b93a1")


def fill_of(timeline: Timeline) -> list[tuple[float, int]]:
    """Return the seconds at which the number of snapshots in memory changes, and the new number.

    A snapshot takes its memory when its stall ends, and frees it when it is durable.
    """
    changes: list[tuple[float, int]] = []
    for began_s, save in timeline.called():
        if save.persist_s is not None and save.durable_s is not None:
            changes += [(began_s + save.stall_s, 1), (began_s + save.durable_s, -1)]
    points, held = [(0.0, 0)], 0
    for at_s, change in sorted(changes):
        held += change
        points.append((at_s, held))
    return points


def memory_fill_chart(timelines: Sequence[Timeline]) -> Chart | None:
    """Return the chart of all background arms; None for records without the times."""
    shown = [(one, fill) for one in timelines if len(fill := fill_of(one)) > 1]
    if not shown:
        return None
    labels = [one.label for one, _ in shown]
    colour = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=labels, range=[*_COLOURS[: len(labels)]]),
        legend=alt.Legend(title=None, orient="top"),
    )
    x = alt.X("x:Q", axis=alt.Axis(title="seconds since the first step", tickCount=6))
    y = alt.Y("y:Q", axis=alt.Axis(title="snapshots in memory", tickMinStep=1))
    points: list[dict[str, Any]] = [
        {"arm": one.label, "x": at, "y": held} for one, fill in shown for at, held in fill
    ]
    stalls = [row for one, fill in shown for row in _stalls(one, fill)]
    lines = alt.Chart(data_of(points)).mark_line(interpolate="step-after", strokeWidth=2)
    stops = alt.Chart(data_of(stalls)).mark_rule(color=_STALL, strokeWidth=5, opacity=0.8)
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("what:N", title="stall")]
    return Chart(
        name="memory-fill",
        title="Snapshots in memory, and stalls",
        alt="Snapshots in memory: " + "; ".join(_words(one, fill) for one, fill in shown) + ".",
        caption="Of each arm, the block whose duration is the median. Orange: a save stops "
        "training, to the length of the bar.",
        spec=spec_of(
            alt.layer(
                lines.encode(x=x, y=y, color=colour),
                stops.encode(x=x, x2="x2:Q", y=y, tooltip=tooltip),
            ),
            _HEIGHT,
        ),
        numbers=Grid(
            columns=(("arm", False), ("at (s)", True), ("snapshots in memory", True)),
            rows=[[row["arm"], f"{row['x']:.3f}", str(row["y"])] for row in points],
        ),
    )


def _stalls(timeline: Timeline, fill: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
    rows = []
    for began_s, save in timeline.called():
        held = [number for at_s, number in fill if at_s <= began_s + save.stall_s]
        rows.append(
            {
                "arm": timeline.label,
                "x": began_s,
                "x2": began_s + save.stall_s,
                "y": held[-1],
                "what": f"step {save.step}: {1e3 * save.stall_s:.0f} ms",
            }
        )
    return rows


def _words(timeline: Timeline, fill: Sequence[tuple[float, int]]) -> str:
    longest = max(save.stall_s for _, save in timeline.called())
    return (
        f"{timeline.label} at most {max(held for _, held in fill)}, longest stall "
        f"{1e3 * longest:.0f} ms"
    )
