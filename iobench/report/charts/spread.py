"""Rows of a figure with its interval and its samples: rates, ratios, shares, times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt

from iobench.report.document import Chart, Dot, Spread
from iobench.report.grid import Column, Grid, span
from iobench.report.page.theme import INK, MUTED, data_of, spec_of

_LANE = 52  # pixels
_LABEL = 0.24  # within a lane, from its top
_BODY = 0.68  # where the marks of a lane are, from its top: row 0 has them at y = _BODY
_HEAD = 0.5  # lanes above the first one, for the labels of the marks
_APART = 0.12  # lanes: dots alternate above and below the middle, so that fewer hide others
_MARGIN = 0.05  # of the axis, beyond what it shows
_FARTHEST = 2.0  # dots and intervals may widen the axis by so many times the largest figure
_BESIDE = 0.3  # lanes above and below the marks: the dashed line does not cross the labels


def spread_chart(
    rows: Sequence[Spread],
    *,
    name: str,
    title: str,
    says: str,
    caption: str,
    axis: str,
    headline: str = "",
    mark: tuple[float, str] | None = None,
    ends: tuple[float, float] | None = None,
) -> Chart:
    """Return the chart of `rows`, one below the other.

    Its text, its table and its tooltips are made from the same rows. `says` begins the text for
    people who cannot see it. `axis` is the title of the axis with its unit. The axis has `ends`, or
    begins at 0 and has all that is not far off the figures. `mark` is a dashed line across all
    rows, with its name: what the figures are compared with.
    """
    head = 0.0 if mark is None else _HEAD
    down = alt.Scale(domain=[-head, len(rows)], reverse=True, nice=False, zero=False)
    low, high = ends or _domain(rows)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[low, high], nice=False, zero=False, clamp=True),
        axis=alt.Axis(title=axis, tickCount=6),
    )
    layers = [
        *_mark_layers(
            mark, len(rows), x, down, left=mark is not None and mark[0] > (low + high) / 2
        ),
        *_row_layers(rows, x, _lanes(down), (low, high)),
        *_label_layers(rows, down),
    ]
    spoken = "; ".join(f"{row.label} {row.figure}" for row in rows)
    return Chart(
        name=name,
        title=title,
        headline=headline,
        alt=f"{says}: {spoken}." + (f" Dashed line: {mark[1]}." if mark else ""),
        caption=caption,
        spec=spec_of(alt.layer(*layers), round(_LANE * (len(rows) + head))),
        numbers=_numbers(rows, axis),
    )


def _lanes(scale: alt.Scale) -> alt.Y:
    """Return the encoding of y in lanes from the top; it has no axis, because lanes have labels."""
    return alt.Y("y:Q", scale=scale, axis=None)


def _label_layers(rows: Sequence[Spread], down: alt.Scale) -> Iterator[alt.Chart]:
    values = (
        {"y": at + _LABEL, "label": row.label, "figure": row.figure} for at, row in enumerate(rows)
    )
    texts = alt.Chart(data_of(values)).encode(y=_lanes(down))
    name = texts.mark_text(align="left", fontWeight=600, limit=290, color=INK)
    yield name.encode(text="label:N", x=alt.value(0))
    yield texts.mark_text(align="right", color=INK).encode(text="figure:N", x=alt.value("width"))


def _numbers(rows: Sequence[Spread], axis: str) -> Grid:
    columns: tuple[Column[Spread], ...] = (
        Column("row", lambda row: row.label, figure=False),
        Column(axis, lambda row: _short(row.middle)),
        Column("interval", lambda row: span(row.bounds, _short, " to "), optional=True),
        Column("samples", _samples, figure=False, optional=True, sentence=True),
        Column("shown", lambda row: row.figure, figure=False),
    )
    return Grid.of(rows, columns)


def _samples(row: Spread) -> str:
    return span([dot.x for dot in row.dots], _short, " ")


def _short(value: float) -> str:
    return f"{value:.4g}"


def _row_layers(
    rows: Sequence[Spread], x: alt.X, y: alt.Y, ends: tuple[float, float]
) -> Iterator[alt.Chart]:
    colour = alt.Color("colour:N", scale=None)
    words = dict.fromkeys(heading for row in rows for dot in row.dots for heading in dot.words)
    bars = [
        {"y": at + _BODY, "x": row.bounds[0], "x2": row.bounds[1], "colour": row.colour}
        for at, row in enumerate(rows)
        if row.bounds is not None
    ]
    if bars:
        bar = alt.Chart(data_of(bars)).mark_bar(height=10, opacity=0.3, cornerRadius=3)
        yield bar.encode(x=x, x2="x2:Q", y=y, color=colour)
    middles = [{"x": row.middle, "y": at + _BODY} for at, row in enumerate(rows)]
    tick = alt.Chart(data_of(middles)).mark_tick(thickness=3, size=24, color=INK, orient="vertical")
    yield tick.encode(x=x, y=y)
    dots = [
        {
            "x": dot.x,
            "y": at + _BODY + (-_APART if number % 2 else _APART),
            "colour": row.colour,
            "fill": "transparent" if row.hollow else row.colour,
            "shape": _shape(row, dot, ends),
            **{f"word{n}": dot.words.get(heading, "") for n, heading in enumerate(words)},
        }
        for at, row in enumerate(rows)
        for number, dot in enumerate(row.dots)
    ]
    if dots:
        point = alt.Chart(data_of(dots)).mark_point(size=52, opacity=0.85, strokeWidth=1.4)
        yield point.encode(
            x=x,
            y=y,
            color=colour,
            fill=alt.Fill("fill:N", scale=None),
            shape=alt.Shape("shape:N", scale=None),
            tooltip=[alt.Tooltip(f"word{n}:N", title=one) for n, one in enumerate(words)],
        )


def _mark_layers(
    mark: tuple[float, str] | None, lanes: int, x: alt.X, down: alt.Scale, *, left: bool
) -> Iterator[alt.Chart]:
    if mark is None:
        return
    at_x, label = mark
    parts = [
        {"x": at_x, "y": at + _BODY - _BESIDE, "y2": at + _BODY + _BESIDE} for at in range(lanes)
    ]
    dashes = alt.Chart(data_of(parts)).mark_rule(color=MUTED, strokeDash=[4, 3], strokeWidth=1.5)
    yield dashes.encode(x=x, y=_lanes(down), y2="y2:Q")
    base = alt.Chart(data_of([{"x": at_x, "y": -_HEAD / 2, "label": label}]))
    text = base.mark_text(align="right" if left else "left", color=MUTED)
    yield text.encode(x=x, y=_lanes(down), text="label:N")


def _shape(row: Spread, dot: Dot, ends: tuple[float, float]) -> str:
    """Return the shape of a dot; a triangle shows that it is beyond the end of the axis."""
    if ends[0] <= dot.x <= ends[1]:
        return row.shape
    return "triangle-left" if dot.x < ends[0] else "triangle-right"


def _domain(rows: Sequence[Spread]) -> tuple[float, float]:
    """Return the ends of the axis: 0, and all figures with what is not far off them."""
    high = max(row.middle for row in rows)
    others = [end for row in rows for end in row.bounds or ()]
    others += [dot.x for row in rows for dot in row.dots]
    high = max([high, *(one for one in others if one <= high + _FARTHEST * (high or 1.0))])
    return 0.0, high + _MARGIN * (high or 1.0)
