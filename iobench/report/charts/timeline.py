"""Steps of a block of training over time, with the stalls and persists of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from iobench.report.document import Chart
from iobench.report.grid import Grid
from iobench.report.page.theme import data_of, spec_of
from iobench.results import TrainBlock, TrainSave
from iobench.units import count_of, format_seconds

__all__ = ["Timeline", "timeline_chart"]

_HEIGHT = 150
_STALL, _PERSIST = "#d5622a", "#2b7bd0"
_ORANGE = "Orange: a checkpoint stops training."
_MARGIN = 1.1  # of the axis, beyond the longest step


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One block on the clock of its own: when its steps, stalls and persists begin and end.

    Training stops during a stall. A persist ends when the checkpoint is durable. Where a record
    lacks that time, the persist begins with the end of its stall.
    """

    label: str
    colour: str
    block: TrainBlock

    def steps(self) -> list[dict[str, Any]]:
        """Return begin, end and milliseconds of each step."""
        rows, at_s = [], 0.0
        stalls = {one.step: one.stall_s for one in self.block.saves}
        parts = zip(self.block.step_s, self.block.persisting, strict=True)
        for number, (step_s, persisting) in enumerate(parts, 1):
            rows.append(
                {
                    "x": at_s,
                    "x2": at_s + step_s,
                    "y": 1e3 * step_s,
                    "step": f"step {number}, {format_seconds(step_s)}",
                    "state": "while persisting" if persisting else "nothing persisted",
                }
            )
            at_s += step_s + stalls.get(number, 0.0)
        return rows

    def called(self) -> list[tuple[float, TrainSave]]:
        """Return each checkpoint with the seconds at which it was called for."""
        ends = {number: row["x2"] for number, row in enumerate(self.steps(), 1)}
        return [(ends.get(save.step, 0.0), save) for save in self.block.saves]

    def saves(self) -> list[dict[str, Any]]:
        """Return begin and end of each stall and persist, with its checkpoint in words."""
        rows = []
        for began_s, save in self.called():
            stopped_s = began_s + save.stall_s
            what = f"checkpoint of step {save.step}, {save.status}"
            stall = f"stall {format_seconds(save.stall_s)}"
            rows.append(
                {"x": began_s, "x2": stopped_s, "kind": "stall", "what": f"{what}: {stall}"}
            )
            if save.persist_s is not None:
                persist = f"persist {format_seconds(save.persist_s)}"
                from_s = stopped_s
                if save.durable_s is not None:
                    from_s = began_s + save.durable_s - save.persist_s
                rows.append(
                    {
                        "x": from_s,
                        "x2": from_s + save.persist_s,
                        "kind": "persist",
                        "what": f"{what}: {persist}",
                    }
                )
        return rows


def timeline_chart(timeline: Timeline, *, name: str, end_s: float, slowest_s: float) -> Chart:
    """Return the chart of one block. Equal axes (`end_s`, `slowest_s`) make blocks comparable."""
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[0, end_s], nice=False),
        axis=alt.Axis(title="seconds since the first step", tickCount=6),
    )
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=[0, _MARGIN * 1e3 * slowest_s], nice=False),
        axis=alt.Axis(title="step, ms", tickCount=4),
    )
    steps, saves = timeline.steps(), timeline.saves()
    layers = _save_layers(saves, x)
    bars = alt.Chart(data_of(steps)).mark_rule(strokeWidth=3.5, color=timeline.colour)
    tooltip = [alt.Tooltip("step:N"), alt.Tooltip("state:N", title="checkpoints")]
    layers.append(bars.encode(x=x, x2="x2:Q", y=y, tooltip=tooltip))
    spec = spec_of(alt.layer(*layers), _HEIGHT)
    return Chart(
        name=name,
        title=timeline.label,
        alt=_alt(timeline, steps, saves),
        caption=_caption(timeline),
        spec=spec,
        numbers=_numbers(steps, saves),
    )


def _save_layers(saves: Sequence[dict[str, Any]], x: alt.X) -> list[alt.Chart]:
    """Return persists as light areas and stalls as lines of their width, over the full height."""
    layers = []
    for kind, colour, opacity in (("persist", _PERSIST, 0.16), ("stall", _STALL, 0.85)):
        rows = [row for row in saves if row["kind"] == kind]
        if rows:
            shown = alt.Chart(data_of(rows))
            area = shown.mark_rect(color=colour, opacity=opacity).encode(
                x=x, x2="x2:Q", tooltip=[alt.Tooltip("what:N", title=kind)]
            )
            layers.append(area)
    stalls = [row for row in saves if row["kind"] == "stall"]
    if stalls:  # a short stall would have no visible width
        layers.append(
            alt.Chart(data_of(stalls)).mark_rule(color=_STALL, strokeWidth=1.5).encode(x=x)
        )
    return layers


def _caption(timeline: Timeline) -> str:
    block = timeline.block
    which = f"Block {block.repetition + 1}, {format_seconds(block.wall_s)}"
    if not block.saves:
        return f"{which}, without checkpoints."
    persists = any(one.persist_s is not None for one in block.saves)
    blue = ["Blue: one is persisted in the background."] if persists else []
    parts = (f"{which} until the last checkpoint is durable.", _ORANGE, *blue)
    return " ".join(parts)


def _alt(
    timeline: Timeline, steps: Sequence[dict[str, Any]], saves: Sequence[dict[str, Any]]
) -> str:
    stalls = [row["x2"] - row["x"] for row in saves if row["kind"] == "stall"]
    text = f"{timeline.label}: {count_of(len(steps), 'step')}"
    times = [row["y"] / 1e3 for row in steps]
    if times:
        text += f" of {format_seconds(min(times))} to {format_seconds(max(times))}"
    if stalls:
        text += f", {count_of(len(stalls), 'stall')} of at most {format_seconds(max(stalls))}"
    return f"{text}."


def _numbers(steps: Sequence[dict[str, Any]], saves: Sequence[dict[str, Any]]) -> Grid:
    rows = [[row["step"], f"{row['x']:.3f}", f"{row['x2']:.3f}", row["state"]] for row in steps]
    rows += [[row["what"], f"{row['x']:.3f}", f"{row['x2']:.3f}", row["kind"]] for row in saves]
    columns = (("what", False), ("from (s)", True), ("to (s)", True), ("state", False))
    return Grid(columns=columns, rows=rows)
