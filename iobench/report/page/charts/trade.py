"""The trade: CPU seconds per GiB, and memory, against rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import altair as alt

from iobench.report.grid import Grid
from iobench.report.page.charts.label_places import HEIGHT, placed
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow
from iobench.report.page.theme import INK, MUTED, data_of, spec_of
from iobench.results import MemoryUse
from iobench.units import GIB, MIB, format_size

__all__ = ["memory_chart", "trade_chart"]

_MARGIN = 1.15  # of the axes, beyond the largest figure
_STEP = 4  # between two ticks of memory
_LEAST = MIB  # the left end of the axis of memory: what is below is noise
_SIZE_LABEL = f"datum.value < {GIB} ? datum.value / {MIB} + ' MiB' : datum.value / {GIB} + ' GiB'"


@dataclass(frozen=True, kw_only=True)
class _Point:
    """What a row costs: its place on the axis, in words, and further tooltips by heading."""

    row: RunRow
    x: float
    words: str
    more: Mapping[str, str] = field(default_factory=dict)


def trade_chart(group: Group) -> Chart:
    """Return the chart of the CPU time of each rate. Rows that cannot win are left out."""
    points = [
        _Point(row=row, x=row.summary.cpu_s_per_gib, words=f"{row.summary.cpu_s_per_gib:.2f} s/GiB")
        for row in group.rows
        if row.counts
    ]
    most = _MARGIN * max((one.x for one in points), default=1.0) or 1.0
    x = alt.X("x:Q", scale=_to(most), axis=alt.Axis(title="CPU seconds per GiB", tickCount=6))
    return Chart(
        name=group.slug("trade"),
        title=f"What the rate of each {group.name} costs in CPU time",
        alt=_alt(group, "CPU time", points),
        caption="Higher is faster, further left takes less CPU time from training.",
        spec=spec_of(
            alt.layer(*_layers(group, points, x, [one.x / most for one in points], "CPU")), HEIGHT
        ),
        numbers=Grid(
            columns=(("writer", False), ("GiB/s", True), ("CPU s/GiB", True)),
            rows=[
                [group.label(one.row), f"{one.row.median:.3f}", f"{one.x:.3f}"] for one in points
            ],
        ),
    )


def memory_chart(group: Group) -> Chart | None:
    """Return the chart of the memory of each rate; None for records without memory."""
    points = [
        _Point(row=row, x=max(total, _LEAST), words=format_size(total), more=_parts(used))
        for row in group.rows
        if row.counts and (used := row.summary.memory) and (total := used.total_bytes) is not None
    ]
    if not points:
        return None
    most = max(2 * max(one.x for one in points), _STEP * _LEAST)
    ticks = [_LEAST * _STEP**n for n in range(int(math.log(most / _LEAST, _STEP)) + 1)]
    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", base=2, domain=[_LEAST, most], nice=False),
        axis=alt.Axis(title="memory", values=ticks, labelExpr=_SIZE_LABEL),
    )
    across = [math.log(one.x / _LEAST) / math.log(most / _LEAST) for one in points]
    return Chart(
        name=group.slug("memory"),
        title=f"What the rate of each {group.name} costs in memory",
        alt=_alt(group, "memory", points),
        caption="Higher is faster, further left takes less memory from training: that of the "
        "processes without the tensors, and the page cache that the files fill. "
        f"Each tick is {_STEP} times the one before.",
        spec=spec_of(alt.layer(*_layers(group, points, x, across, "memory")), HEIGHT),
        numbers=Grid(
            columns=(("writer", False), ("GiB/s", True), *((name, True) for name in _PARTS)),
            rows=[
                [group.label(one.row), f"{one.row.median:.3f}", *one.more.values()]
                for one in points
            ],
        ),
    )


_PARTS = ("of the processes", "page cache")


def _parts(used: MemoryUse) -> dict[str, str]:
    """Return both parts, which are known if their sum is."""
    parts = (used.process_bytes or 0, used.page_cache_bytes or 0)
    return {name: format_size(one) for name, one in zip(_PARTS, parts, strict=True)}


def _layers(
    group: Group, points: Sequence[_Point], x: alt.X, across: Sequence[float], cost: str
) -> list[alt.Chart]:
    """Return the layers of a labelled dot for each point.

    `across` are their places on the axis, from 0 to 1.
    """
    most = _MARGIN * max((one.row.median for one in points), default=1.0)
    y = alt.Y("y:Q", scale=_to(most), axis=alt.Axis(title="GiB/s", tickCount=5))
    texts = [group.label(one.row) for one in points]
    tops = [1 - one.row.median / most for one in points]
    places = list(placed(list(zip(across, tops, texts, strict=True))))
    values = [
        {
            "x": one.x,
            "y": one.row.median,
            "label": text,
            "colour": one.row.colour,
            "shape": one.row.shape,
            "rate": f"{one.row.median:.2f} GiB/s",
            "cost": one.words,
            **{f"part{number}": part for number, part in enumerate(one.more.values())},
            "x2": one.x,
            "y2": one.row.median,
            "align": place.align,
            "dx": place.dx,
            "dy": place.dy,
        }
        for one, text, place in zip(points, texts, places, strict=True)
    ]
    base = alt.Chart(data_of(values)).encode(x=x, y=y)
    parts = dict.fromkeys(name for one in points for name in one.more)
    tips = [("label", "writer"), ("rate", "rate"), ("cost", cost)]
    tips += [(f"part{number}", name) for number, name in enumerate(parts)]
    dots = base.mark_point(size=110, filled=True, opacity=0.9).encode(
        color=alt.Color("colour:N", scale=None),
        shape=alt.Shape("shape:N", scale=None),
        tooltip=[alt.Tooltip(f"{name}:N", title=title) for name, title in tips],
    )
    labels = base.mark_text(  # the fields of the place are ours, not the record's
        baseline="middle",
        color=INK,
        limit=220,
        align=alt.expr("datum.align"),
        dx=alt.expr("datum.dx"),
        dy=alt.expr("datum.dy"),
    )
    leaders = [value for value, place in zip(values, places, strict=True) if place.apart]
    lines = alt.Chart(data_of(leaders)).mark_rule(
        color=MUTED,
        opacity=0.6,
        x2Offset=alt.expr("datum.dx + (datum.dx < 0 ? 2 : -2)"),
        y2Offset=alt.expr("datum.dy"),
    )
    own = [lines.encode(x=x, y=y, x2="x2:Q", y2="y2:Q")] if leaders else []
    return [*own, dots, labels.encode(text="label:N")]


def _alt(group: Group, cost: str, points: Sequence[_Point]) -> str:
    spoken = "; ".join(
        f"{group.label(one.row)} {one.row.median:.2f} GiB/s for {one.words}" for one in points
    )
    return f"Rate against {cost} of each {group.name}: {spoken}."


def _to(most: float) -> alt.Scale:
    return alt.Scale(domain=[0, most], nice=False, zero=True)
