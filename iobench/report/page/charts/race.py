"""The race of a tuning: settings against rounds, and each option against the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from iobench.bench.judging.stats import median
from iobench.report.grid import Grid
from iobench.report.page.page import Chart
from iobench.report.page.palette import colour_of
from iobench.report.page.theme import INK, MUTED, data_of, spec_of
from iobench.tune.objective import Objective
from iobench.tune.race import RaceEntry, RaceStatus
from iobench.tune.replay import ReplayedTuning
from iobench.units import GIB, count_of, format_size_exact

__all__ = ["LossScale", "parameter_charts", "race_chart", "scale_of"]

_HEIGHT, _LOW = 340, 200
_ENDS = {
    RaceStatus.DROPPED: "cross",
    RaceStatus.CUT: "stroke",
    RaceStatus.OVER: "triangle-down",
    RaceStatus.FAILED: "triangle-down",
}
_IN_RACE = ("race", "refine")


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


def race_chart(found: ReplayedTuning, chosen: str | None) -> Chart:
    """Return the chart of the race: a line for each setting, until it is dropped."""
    scale = scale_of(found.objective)
    lines = list(_line_values(found, scale))
    ends = list(_end_values(found, scale))
    writers = list(dict.fromkeys(row["writer"] for row in lines))
    x = alt.X(
        "x:Q",
        scale=alt.Scale(nice=False, padding=14),
        axis=alt.Axis(title="round", tickMinStep=1, format="d"),
    )
    y = alt.Y("y:Q", scale=alt.Scale(zero=True), axis=alt.Axis(title=scale.title, tickCount=5))
    colour = alt.Color(
        "writer:N", scale=alt.Scale(domain=writers, range=[colour_of(one) for one in writers])
    )
    tips = [alt.Tooltip(f"{name}:N") for name in ("setting", "round", "figure", "outcome")]
    base = alt.Chart(data_of(lines))
    layers = [
        base.mark_line(strokeWidth=1.5, opacity=0.8).encode(
            x=x, y=y, color=colour, detail="setting:N"
        ),
        base.mark_point(size=30, filled=True, opacity=1).encode(
            x=x, y=y, color=colour, tooltip=tips
        ),
        alt.Chart(data_of(ends))
        .mark_point(size=70, strokeWidth=2, color=MUTED)
        .encode(x=x, y=y, shape=alt.Shape("mark:N", scale=None), tooltip=tips),
    ]
    own = [row for row in lines if row["setting"] == chosen]
    if own:
        layers.append(alt.Chart(data_of(own)).mark_line(strokeWidth=3, color=INK).encode(x=x, y=y))
    return Chart(
        name="race",
        title="The race, round by round",
        alt=_alt(found, chosen),
        caption="One line per setting. A cross: shown worse and dropped. A dash: left behind. "
        "A triangle: failed, or over a limit." + (" Thick: the chosen one." if own else ""),
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=_numbers(found, scale),
    )


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
        spec=spec_of(alt.layer(*dots), _LOW),
        numbers=Grid(
            columns=((option, False), ("setting", False), (scale.title, True)),
            rows=[[row["value"], row["setting"], f"{row['y']:.3f}"] for row in rows],
        ),
    )


def _line_values(found: ReplayedTuning, scale: LossScale) -> Iterator[dict[str, Any]]:
    for name, entry in found.race.trials.items():
        for number, loss in entry.losses.items():
            yield {"x": number, "y": scale.of(loss), **_words(found, name, number, loss)}


def _end_values(found: ReplayedTuning, scale: LossScale) -> Iterator[dict[str, Any]]:
    for name, entry in found.race.trials.items():
        if entry.losses and entry.status in _ENDS:
            number = max(entry.losses)
            loss = entry.losses[number]
            words = _words(found, name, number, loss)
            yield {"x": number, "y": scale.of(loss), "mark": _ENDS[entry.status], **words}


def _words(found: ReplayedTuning, name: str, number: int, loss: float) -> dict[str, str]:
    entry = found.race.trials[name]
    size = next(
        one.size_bytes
        for one, label in zip(found.trials, found.labels, strict=True)
        if (label, one.round) == (name, number)
    )
    return {
        "setting": name,
        "writer": entry.candidate.writer,
        "round": str(number),
        "figure": found.objective.show(loss, size),
        "outcome": _outcome(entry),
    }


def _outcome(entry: RaceEntry[Any]) -> str:
    if entry.running:
        return "in the race until its end"
    return f"{entry.status}: {entry.cause}" if entry.cause else str(entry.status)


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


def _alt(found: ReplayedTuning, chosen: str | None) -> str:
    counts: dict[str, int] = {}
    for entry in found.race.trials.values():
        what = "ran to the end" if entry.running else str(entry.status)
        counts[what] = counts.get(what, 0) + 1
    rounds = len({one.round for one in found.trials if one.phase in _IN_RACE})
    ends = ", ".join(f"{count} {what}" for what, count in counts.items())
    end = f" Chosen: {chosen}." if chosen else ""
    settings = count_of(len(found.race.trials), "setting")
    return f"{settings} raced in {count_of(rounds, 'round')}: {ends}.{end}"


def _numbers(found: ReplayedTuning, scale: LossScale) -> Grid:
    columns = (
        *(("setting", False), ("rounds", True), (f"median, {scale.title}", True)),
        ("outcome", False),
    )
    rows = [
        [
            name,
            str(len(entry.losses)),
            f"{scale.of(median(list(entry.losses.values()))):.3f}" if entry.losses else "-",
            _outcome(entry),
        ]
        for name, entry in found.race.trials.items()
    ]
    return Grid(columns=columns, rows=rows)
