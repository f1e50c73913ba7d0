"""Series of samples as text: bytes over time, with one line of bars for each counter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TextIO

from iobench.report.grid import console_for, wrapped
from iobench.results import ResultFile, Sample, figure_of
from iobench.results.labels import labels
from iobench.units import format_rate, format_seconds

__all__ = ["bars", "write"]

_BARS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"
_MOST_COLUMNS = 100
_LABEL_WIDTH = 12  # of a counter's name, with the spaces around it


def write(result: ResultFile, stream: TextIO) -> None:
    """Write the series of each sample that has one, by contender, operation and repetition.

    `·` means that no byte was counted in that time. The bars are parts of the line's highest rate.
    """
    have = [sample for sample in result.samples if sample.series is not None]
    if not have:
        stream.write("no series: recorded before iobench kept them\n")
        return
    first = {figure_of(sample): sample for sample in reversed(have)}
    names = dict(zip(first, labels(one.setting for one in first.values()), strict=True))
    have.sort(key=lambda one: (one.operation == "restore", names[figure_of(one)]))
    width = console_for(stream).width
    for sample in have:
        what = f"{names[figure_of(sample)]} {sample.operation} {sample.repetition + 1}"
        stream.write(wrapped(f"{what}: {format_seconds(sample.elapsed_s)}", width) + "\n")
        for line in _lines(sample, min(_MOST_COLUMNS, width - _LABEL_WIDTH)):
            stream.write(wrapped(line, width, " " * _LABEL_WIDTH) + "\n")


def _lines(sample: Sample, columns: int) -> Iterator[str]:
    """Yield the lines of one sample, with bars in `columns` columns."""
    series = sample.series
    assert series is not None
    counted = (("completed", series.completed), (series.counter, series.counted))
    for name, values in counted:
        if values is not None:
            step = math.ceil(len(values) / columns)
            rates = _rates(values, step, series.interval_s, sample.elapsed_s)
            of = format_seconds(step * series.interval_s)
            yield f"  {name:<9} {bars(rates)} {of} each, up to {format_rate(max(rates))}"


def _rates(values: Sequence[int], step: int, interval_s: float, elapsed_s: float) -> list[float]:
    """Return bytes per second for every `step` intervals; the last ends at `elapsed_s`."""
    rates = []
    for begin in range(0, len(values), step):
        end_s = min((begin + step) * interval_s, elapsed_s)
        rates.append(sum(values[begin : begin + step]) / max(end_s - begin * interval_s, 1e-9))
    return rates


def bars(rates: Sequence[float]) -> str:
    """Return one character for each rate, in eighths of the highest rate."""
    top = max(rates)
    return "".join(
        _BARS[min(int(len(_BARS) * rate / top), len(_BARS) - 1)] if rate > 0 else _NOTHING
        for rate in rates
    )
