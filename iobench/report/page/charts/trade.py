"""The trade: CPU seconds per GiB against rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from iobench.report.grid import Grid
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group
from iobench.report.page.theme import INK, data_of, spec_of

__all__ = ["trade_chart"]

_HEIGHT = 300
_WIDTH = 760  # for the labels: a wider chart has more room for them, a phone less
_LETTER, _LINE, _GAP = 7.0, 15, 9  # pixels
_FAR = 0.6 * _WIDTH
_MARGIN = 1.15  # of the axes, beyond the largest figure


def trade_chart(group: Group) -> Chart:
    """Return the chart of the cost of each rate. Rows that cannot win are left out."""
    rows = [row for row in group.rows if row.counts]
    points = [(row.summary.cpu_s_per_gib, row.median, group.label(row)) for row in rows]
    most_x = _MARGIN * max((x for x, _, _ in points), default=1.0) or 1.0
    most_y = _MARGIN * max((y for _, y, _ in points), default=1.0)
    x, y = (
        alt.X("x:Q", scale=_to(most_x), axis=alt.Axis(title="CPU seconds per GiB", tickCount=6)),
        alt.Y("y:Q", scale=_to(most_y), axis=alt.Axis(title="GiB/s", tickCount=5)),
    )
    placed = _placed([(one / most_x, 1 - two / most_y, text) for one, two, text in points])
    values: list[dict[str, Any]] = [
        {
            "x": one,
            "y": two,
            "label": text,
            "colour": row.colour,
            "shape": row.shape,
            "rate": f"{two:.2f} GiB/s",
            "cpu": f"{one:.2f} s/GiB",
            "align": label.align,
            "dx": label.dx,
            "dy": label.dy,
        }
        for (one, two, text), row, label in zip(points, rows, placed, strict=True)
    ]
    base = alt.Chart(data_of(values)).encode(x=x, y=y)
    dots = base.mark_point(size=110, filled=True, opacity=0.9).encode(
        color=alt.Color("colour:N", scale=None),
        shape=alt.Shape("shape:N", scale=None),
        tooltip=[
            alt.Tooltip("label:N", title="writer"),
            alt.Tooltip("rate:N", title="rate"),
            alt.Tooltip("cpu:N", title="CPU"),
        ],
    )
    labels = base.mark_text(  # the fields of the place are ours, not the record's
        baseline="middle",
        color=INK,
        limit=220,
        align=alt.expr("datum.align"),
        dx=alt.expr("datum.dx"),
        dy=alt.expr("datum.dy"),
    )
    return Chart(
        name=group.slug("trade"),
        title=f"What the rate of each {group.name} costs",
        alt=f"Rate against CPU time of each {group.name}: "
        + "; ".join(f"{text} {two:.2f} GiB/s for {one:.2f} CPU s/GiB" for one, two, text in points)
        + ".",
        caption="Higher is faster, further left takes less CPU time from training.",
        spec=spec_of(alt.layer(dots, labels.encode(text="label:N")), _HEIGHT),
        numbers=Grid(
            columns=(("writer", False), ("GiB/s", True), ("CPU s/GiB", True)),
            rows=[[text, f"{two:.3f}", f"{one:.3f}"] for one, two, text in points],
        ),
    )


def _to(most: float) -> alt.Scale:
    return alt.Scale(domain=[0, most], nice=False, zero=True)


@dataclass(frozen=True)
class _Label:
    align: str
    dx: int
    dy: int

    def box(self, x: float, y: float, width: float) -> tuple[float, float, float, float]:
        left = {"left": 0.0, "right": -width, "center": -width / 2}[self.align] + x + self.dx
        return left, y + self.dy - _LINE / 2, left + width, y + self.dy + _LINE / 2


_PLACES = (
    _Label("left", _GAP, 0),
    _Label("right", -_GAP, 0),
    _Label("center", 0, -_GAP - 6),
    _Label("center", 0, _GAP + 7),
    _Label("left", _GAP, -_LINE),
    _Label("left", _GAP, _LINE),
    _Label("right", -_GAP, -_LINE),
    _Label("right", -_GAP, _LINE),
    _Label("center", 0, -2 * _LINE),
    _Label("center", 0, 2 * _LINE),
)


def _placed(points: Sequence[tuple[float, float, str]]) -> Iterator[_Label]:
    """Yield the place of each label: the first one that hides no other label and no point.

    `points` are parts of width and height, from the top left.
    """
    at = [(x * _WIDTH, y * _HEIGHT) for x, y, _ in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    for number, (x, y) in enumerate(at):
        width = _LETTER * len(points[number][2])
        others = [box for position, box in enumerate(taken) if position != number]
        # To the left where a narrow chart would have no room to the right.
        places = sorted(_PLACES, key=lambda one: one.align == "left") if x > _FAR else _PLACES
        free = (
            label
            for label in places
            if _inside(box := label.box(x, y, width)) and not any(_meet(box, one) for one in others)
        )
        label = next(free, places[0])
        taken.append(label.box(x, y, width))
        yield label


def _inside(box: tuple[float, float, float, float]) -> bool:
    return box[0] >= 0 and box[2] <= _WIDTH and box[1] >= 0


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
