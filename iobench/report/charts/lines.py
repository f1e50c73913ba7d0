"""Lines over time, with dots: a curve for each writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from iobench.report.document import Chart, Dot
from iobench.report.grid import Grid, words
from iobench.report.page.theme import data_of, spec_of

_HEIGHT = 280


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line, with `dots` on it. Curves of one `label` have one colour and are one in the legend.

    `figure` says in words what the line shows; a curve without it is not in the texts of the chart.
    """

    label: str
    colour: str
    line: Sequence[tuple[float, float]] = ()
    dots: Sequence[Dot] = ()
    figure: str = ""
    dashed: bool = False

    @property
    def points(self) -> Sequence[tuple[float, float]]:
        return self.line or [(dot.x, dot.y) for dot in self.dots]


def lines_chart(
    curves: Sequence[Curve],
    *,
    name: str,
    title: str,
    says: str,
    caption: str,
    x: alt.X,
    y: alt.Y,
    step: bool = False,
) -> Chart:
    """Return the chart of `curves`. `says` begins the text for people who cannot see it.

    With `step` each value of a line holds until the next one.
    """
    colours = {one.label: one.colour for one in curves}
    scale = alt.Scale(domain=[*colours], range=[*colours.values()])
    encoded = {"x": x, "y": y, "color": alt.Color("label:N", scale=scale)}
    lines = alt.Chart(data_of(_line_values(curves))).mark_line(
        strokeWidth=1.6, clip=True, interpolate="step-after" if step else "linear"
    )
    dash = alt.StrokeDash("dashed:N", scale=alt.Scale(domain=[False, True], range=[[1, 0], [7, 4]]))
    layers = [
        lines.encode(**encoded, detail="curve:N", order="number:Q", strokeDash=dash.legend(None))
    ]
    if values := list(_dot_values(curves)):
        words = dict.fromkeys(
            heading for one in curves for dot in one.dots for heading in dot.words
        )
        dots = alt.Chart(data_of(values)).mark_point(size=52, filled=True, opacity=0.9)
        shape = alt.Shape("shape:N", scale=None)
        tips = [alt.Tooltip(f"word{number}:N", title=one) for number, one in enumerate(words)]
        layers.append(dots.encode(**encoded, shape=shape, tooltip=tips))
    spoken = "; ".join(f"{one.label} {one.figure}" for one in curves if one.figure)
    return Chart(
        name=name,
        title=title,
        alt=f"{says}: {spoken}.",
        caption=caption,
        spec=spec_of(alt.layer(*layers), _HEIGHT),
        numbers=_numbers(curves),
    )


def _line_values(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    for curve, one in enumerate(curves):
        own = {"label": one.label, "curve": curve, "dashed": one.dashed}
        yield from ({"x": x, "y": y, "number": n, **own} for n, (x, y) in enumerate(one.points))


def _dot_values(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    for one in curves:
        for dot in one.dots:
            words = {f"word{number}": word for number, word in enumerate(dot.words.values())}
            yield {"x": dot.x, "y": dot.y, "label": one.label, "shape": dot.shape, **words}


def _numbers(curves: Sequence[Curve]) -> Grid:
    rows = [
        [one.label, one.figure, " ".join(f"{x:.3g}:{y:.3g}" for x, y in one.points)]
        for one in curves
        if one.figure
    ]
    return Grid(columns=words("line", "shown", "points, x:y", sentence=True), rows=rows)
