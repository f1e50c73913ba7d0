"""The options of a tuning: each value of an option against the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from iobench.bench.judging.stats import median
from iobench.report.grid import Grid
from iobench.report.page.page import Chart
from iobench.report.page.palette import colour_of
from iobench.report.page.theme import data_of, spec_of
from iobench.tune.objective import Objective
from iobench.tune.race import RaceEntry
from iobench.tune.replay import ReplayedTuning
from iobench.units import GIB, format_size_exact

__all__ = ["LossScale", "parameter_charts", "scale_of"]

_HEIGHT = 200


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How a loss is drawn: its value on the axis, whose unit is GiB/s, or ms of a stall."""

    goal: str

    @property
    def title(self) -> str:
        """The title of the axis, with its unit."""
        return "stall, ms" if self.goal == "stall" else "GiB/s"

    def of(self, loss: float) -> float:
        """Return where `loss` is on the axis."""
        return 1e3 * loss if self.goal == "stall" else 1 / loss / GIB


def scale_of(objective: Objective) -> LossScale:
    """Return the scale of an objective."""
    return LossScale(goal=objective.goal)


def parameter_charts(found: ReplayedTuning, chosen: str | None) -> Iterator[Chart]:
    """Yield a chart for each option that was varied: its values against the rate."""
    scale = scale_of(found.objective)
    tried = {name: one for name, one in found.race.trials.items() if one.losses}
    names = dict.fromkeys(
        option for one in tried.values() for option in one.candidate.options.to_dict()
    )
    for option in names:
        rows = list(_values_of(option, tried, scale))
        if any(len({r["value"] for r in rows if r["writer"] == w}) > 1 for w in _writers(rows)):
            yield _parameter_chart(option, rows, scale, chosen)


def _parameter_chart(
    option: str, rows: Sequence[Mapping[str, Any]], scale: LossScale, chosen: str | None
) -> Chart:
    values = sorted(dict.fromkeys((row["order"], row["value"]) for row in rows))
    writers = _writers(rows)
    what = "the stall" if scale.goal == "stall" else "the rate"
    x = alt.X(
        "value:N",
        sort=[value for _, value in values],
        scale=alt.Scale(paddingInner=0.5, paddingOuter=0.25),
        axis=alt.Axis(title=option, labelAngle=0),
    )
    y = alt.Y("y:Q", scale=alt.Scale(zero=True), axis=alt.Axis(title=scale.title, tickCount=4))
    colour = alt.Color(
        "writer:N", scale=alt.Scale(domain=writers, range=[colour_of(one) for one in writers])
    )
    offset = alt.XOffset("writer:N", scale=alt.Scale(domain=writers))
    tips = [alt.Tooltip("setting:N"), alt.Tooltip("figure:N", title=scale.title)]
    dots = [
        alt.Chart(data_of(own))
        .mark_point(size=size, filled=filled, opacity=0.9, strokeWidth=1.6)
        .encode(x=x, y=y, xOffset=offset, color=colour, tooltip=tips)
        for own, size, filled in (
            ([row for row in rows if row["setting"] != chosen], 60, False),
            ([row for row in rows if row["setting"] == chosen], 130, True),
        )
        if own
    ]
    best: dict[str, str] = {}
    for row in sorted(rows, key=lambda one: one["y"], reverse=scale.goal != "stall"):
        best.setdefault(row["value"], row["figure"])
    spoken = "; ".join(f"{value}: {best[value]}" for _, value in values)
    return Chart(
        name=f"option-{option.replace('_', '-')}",
        title=f"{option} and {what}",
        alt=f"Best figure with each {option}, {scale.title}. {spoken}.",
        caption="One dot per setting: the median of its rounds. The other options differ too."
        + (" Filled: the chosen one." if chosen else ""),
        spec=spec_of(alt.layer(*dots), _HEIGHT),
        numbers=Grid(
            columns=((option, False), ("setting", False), (scale.title, True)),
            rows=[[row["value"], row["setting"], f"{row['y']:.3f}"] for row in rows],
        ),
    )


def _values_of(
    option: str, tried: Mapping[str, RaceEntry[Any]], scale: LossScale
) -> Iterator[dict[str, Any]]:
    for name, entry in tried.items():
        options = entry.candidate.options.to_dict()
        if option in options:
            middle = scale.of(median(list(entry.losses.values())))
            value = options[option]
            number = isinstance(value, int | float)
            yield {
                "value": _value(option, value),
                "order": (0, float(value)) if number else (1, 0.0),
                "y": middle,
                "writer": entry.candidate.writer,
                "setting": name,
                "figure": f"{middle:.3g}",
            }


def _value(option: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size_exact(value) if option.endswith("size") else str(value)


def _writers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(row["writer"]) for row in rows))
