"""ETTR against the interval between two saves: a curve for each way to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt
import numpy as np

from iobench.goodput import goodput
from iobench.goodput.forecast import Forecast
from iobench.report.charts.lines import Curve, lines_chart
from iobench.report.document import Chart, Dot
from iobench.report.grid import Grid
from iobench.report.palette import colour_of
from iobench.units import format_seconds

_POINTS = 60
_AROUND = 20.0  # times the shortest and the longest best interval
_LOWEST = 0.05  # the axis begins above it where no curve goes below
_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))


def interval_chart(forecasts: Sequence[Forecast], numbers: Grid, *, name: str) -> Chart:
    """Return the chart of one job: a curve for each way to save, with its best interval."""
    job, best = forecasts[0].job, [one.best.interval_s for one in forecasts]
    low_s, high_s = min(best) / _AROUND, max(best) * _AROUND
    unit, seconds = next(
        one for one in _UNITS if (low_s * high_s) ** 0.5 < 120 * one[1] or one is _UNITS[-1]
    )
    low, high = low_s / seconds, high_s / seconds
    least = 1 - 4 * (1 - min(one.best.ettr for one in forecasts))  # curves fall to 0 on both sides
    floor = least if least > _LOWEST else 0.0
    top = min(1.0, 2 * max(one.best.ettr for one in forecasts))
    return lines_chart(
        [_curve(one, low_s, high_s, seconds, floor) for one in forecasts],
        name=name,
        title=f"ETTR on {job.nodes:,} nodes, by how often a checkpoint is saved",
        says="Highest effective training time ratio (ETTR)",
        caption="ETTR: the part of the time that trains. A failure every "
        f"{format_seconds(job.mtbf_s)}. The dot is the best interval; left of it saves cost more, "
        "right of it failures do."
        + (" Dashed: asynchronous saves." if any(map(_is_async, forecasts)) else ""),
        x=alt.X(
            "x:Q",
            scale=alt.Scale(type="log", domain=[low, high], nice=False),
            axis=alt.Axis(
                title=f"training time between two saves, {unit}",
                values=_ticks(low, high),
                format="~r",
            ),
        ),
        y=alt.Y(
            "y:Q",
            scale=alt.Scale(domain=[floor, top], nice=False, clamp=True),
            axis=alt.Axis(title="ETTR", tickCount=5),
        ),
        numbers=numbers,
    )


def _curve(one: Forecast, low_s: float, high_s: float, seconds: float, floor: float) -> Curve:
    name, mode = one.candidate.name, one.candidate.mode
    every, figure = format_seconds(one.best.interval_s), f"{one.best.ettr:.4f}"
    words = {"writer": f"{name} {mode}", "save every": every, "ETTR": figure}
    return Curve(
        label=f"{name} {mode}",
        colour=colour_of(name.split()[0]),
        line=[(at_s / seconds, y) for at_s, y in _points(one, low_s, high_s) if y >= floor],
        dots=[Dot(x=one.best.interval_s / seconds, y=one.best.ettr, words=words)],
        figure=f"{figure} every {every}",
        dashed=_is_async(one),
    )


def _is_async(one: Forecast) -> bool:
    return one.candidate.costs.asynchronous


def _points(one: Forecast, low_s: float, high_s: float) -> Iterator[tuple[float, float]]:
    """Yield intervals and their ETTR, not below the interval at which saves wait."""
    costs = one.candidate.costs
    start_s = max(low_s, costs.persist_s)
    if start_s < high_s:
        for interval_s in np.geomspace(start_s, high_s, _POINTS).tolist():
            yield interval_s, goodput.ettr(interval_s, costs, one.job)


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from `low` to `high`."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [t for p in powers for t in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if low <= t <= high]
