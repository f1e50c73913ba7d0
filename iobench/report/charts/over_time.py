"""Over time: the bytes of one save or restore of each writer, by its own count and the device's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import altair as alt

from iobench.report.charts.spread import label_layers, lane_axis, lane_height, lane_scale
from iobench.report.document import Chart
from iobench.report.grid import Grid
from iobench.report.page.theme import GRID, INK, data_of, spec_of
from iobench.report.rows import Group, RunRow, in_gib_per_s
from iobench.results import Sample
from iobench.units import format_seconds

__all__ = ["over_time_chart"]

_MOST_POINTS = 60  # of a row
_LEAST_STEP = 0.25  # of a step: a shorter last one is joined with the one before
_WRITER = "writer"  # what counts, next to `device` and `process`
_RISE = 0.6  # lanes from the base of a row to the highest rate of all


def over_time_chart(group: Group) -> Chart | None:
    """Return the chart of the median sample of each row; None where no sample has a series."""
    shown = [(row, sample) for row in group.rows if (sample := _median_sample(row))]
    if not shown:
        return None
    points = [point for lane, (row, one) in enumerate(shown) for point in _points(lane, row, one)]
    most = max(point["rate"] for point in points) or 1.0
    for point in points:
        point["top"] = round(point["base"] - _RISE * point["rate"] / most, 4)
    down = lane_scale(len(shown))
    x = alt.X(
        "x:Q", axis=alt.Axis(title="seconds", tickCount=6), scale=alt.Scale(nice=False, zero=True)
    )
    top = lane_axis("top", down)
    base = alt.Chart(data_of(points)).encode(x=x, y=top, detail="base:N")
    own = base.transform_filter(f"datum.counter == '{_WRITER}'").encode(
        color=alt.Color("colour:N", scale=None)
    )
    device = base.transform_filter(f"datum.counter != '{_WRITER}'")
    floors = alt.Chart(data_of({"y": lane + 1} for lane in range(len(shown))))
    layers = [
        floors.mark_rule(color=GRID).encode(y=lane_axis("y", down)),
        device.mark_area(interpolate="step-after", opacity=0.07, color=INK).encode(y2="base:Q"),
        own.mark_area(interpolate="step-after", opacity=0.35).encode(y2="base:Q"),
        own.mark_line(interpolate="step-after", strokeWidth=1.4),
        device.mark_line(interpolate="step-after", strokeWidth=1.3, color=INK),
        base.mark_point(size=90, opacity=0, filled=True).encode(tooltip=_TOOLTIP),
        *label_layers([(group.label(row), _figure(one)) for row, one in shown], down),
    ]
    return Chart(
        name=group.slug("over-time"),
        title=f"Over time: the median {group.name} of each writer",
        alt=_alt(group, points, shown),
        caption=_caption(shown, most),
        spec=spec_of(alt.layer(*layers), lane_height(len(shown))),
        numbers=_numbers(points),
    )


_TOOLTIP = [
    alt.Tooltip("writer:N", title="writer"),
    alt.Tooltip("counter:N", title="counted by"),
    alt.Tooltip("x:Q", title="seconds", format=".2f"),
    alt.Tooltip("rate:Q", title="GiB/s", format=".2f"),
]


def _median_sample(row: RunRow) -> Sample | None:
    """Return the sample with a series whose rate is nearest to the median."""
    have = [
        (abs(rate - row.median), sample)
        for sample, rate in zip(row.samples, row.rates, strict=True)
        if sample.series is not None and (sample.series.completed or sample.series.counted)
    ]
    return min(have, key=lambda one: one[0])[1] if have else None


def _points(lane: int, row: RunRow, sample: Sample) -> Iterator[dict[str, Any]]:
    series = sample.series
    assert series is not None
    for counter, values in (
        (_WRITER, series.completed),
        (series.counter, series.counted),
    ):
        if not values:
            continue
        rates = _rates(values, series.interval_s, sample.elapsed_s)
        for begin_s, rate in [*rates, (sample.elapsed_s, rates[-1][1])]:
            yield {  # there are many of these: few fields, and few digits
                "base": lane + 1,
                "x": round(begin_s, 4),
                "rate": round(in_gib_per_s(rate), 5),
                "colour": row.colour,
                "writer": row.summary.label,
                "counter": counter,
            }


def _rates(values: Sequence[int], interval_s: float, elapsed_s: float) -> list[tuple[float, float]]:
    """Return the begin and the rate of each step. The last one ends with the clock."""
    step = math.ceil(len(values) / _MOST_POINTS)
    begins = list(range(0, len(values), step))
    if len(begins) > 1 and elapsed_s - begins[-1] * interval_s < _LEAST_STEP * step * interval_s:
        begins.pop()  # a moment at the end: its rate is mostly rounding
    rates = []
    for begin, end in pairwise([*begins, len(values)]):
        end_s = min(end * interval_s, elapsed_s) if end < len(values) else elapsed_s
        length_s = max(end_s - begin * interval_s, _LEAST_STEP * interval_s)
        rates.append((begin * interval_s, sum(values[begin:end]) / length_s))
    return rates


def _figure(sample: Sample) -> str:
    return f"repetition {sample.repetition + 1}, {format_seconds(sample.elapsed_s)}"


def _caption(shown: list[tuple[RunRow, Sample]], most: float) -> str:
    series = [one.series for _, one in shown if one.series]
    length = format_seconds(min(one.interval_s for one in series))
    counters = sorted({one.counter for one in series if one.counter})
    line = f" Line: bytes that the {' or '.join(counters)} counted" if counters else ""
    others = ", those of other processes included" if "device" in counters else ""
    return (
        f"Coloured: bytes that the writer completed in each {length}.{line}{others}"
        f"{'.' if line else ''} The highest rate is {most:.2f} GiB/s."
    )


def _alt(group: Group, points: list[dict[str, Any]], shown: list[tuple[RunRow, Sample]]) -> str:
    rows = "; ".join(f"{group.label(row)}: {_figure(one)}" for row, one in shown)
    most = max(point["rate"] for point in points)
    return f"Bytes over time of one {group.name} of each writer, up to {most:.2f} GiB/s: {rows}."


def _numbers(points: list[dict[str, Any]]) -> Grid:
    by_line: dict[tuple[str, str], list[str]] = {}
    for point in points:
        line = by_line.setdefault((point["writer"], point["counter"]), [])
        line.append(f"{point['rate']:.2f}")
    columns = (("writer", False), ("counted by", False), ("GiB/s in each interval", False))
    rows = [[*who, " ".join(rates[:-1])] for who, rates in by_line.items()]
    return Grid(columns=columns, rows=rows, sentences=(2,))
