"""Rates of a run drawn with characters: every sample a dot, median, interval and fio's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.text import Text

from iobench.bench.judging.stats import interval_heading
from iobench.report.ceiling import find_ceilings
from iobench.report.grid import console_for, print_wrapped, wrapped, write_captured
from iobench.report.page.rows import Group, Measured, RunRow, in_gib_per_s
from iobench.report.wording import heading
from iobench.results import ResultFile
from iobench.results.setting import at_target

__all__ = ["write"]

_WIDEST = 100  # columns of a drawing, also in a pipe
_LEAST = 16  # columns of an axis
_GAP = 2
_LABEL_SHARE = 0.3  # of the width; a longer label has a line of its own
_TICK_COLUMNS = 9  # from one figure of the axis to the next, at least
_MOST = 9  # samples that one digit counts


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """The characters of a drawing."""

    dot: str
    low: str
    bar: str
    median: str
    high: str
    ceiling: str
    beyond: str
    more: str

    @property
    def all(self) -> str:
        return "".join(vars(self).values())


_DRAWN = _Marks(dot="•", low="├", bar="─", median="┼", high="┤", ceiling="┊", beyond="→", more="#")
_ASCII = _Marks(dot="o", low="[", bar="-", median="+", high="]", ceiling=":", beyond=">", more="#")


def write(result: ResultFile, stream: TextIO) -> None:
    """Draw the rates of each operation to `stream`, the fastest writer first.

    A row has a line of samples, where a digit counts those in one place, and a line with the
    median and its interval. `stream` gets ASCII characters if its encoding has no others.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    marks = _DRAWN if _can_encode(_DRAWN.all, encoding) else _ASCII
    measured, console = Measured.of(result), console_for(stream)
    ceilings = find_ceilings(result)
    with console.capture() as captured:
        print_wrapped(console, heading(measured.report), style="bold")
        for group in measured.groups:
            limit = ceilings[group.target].of(group.operation)
            drawing = _Drawing.of(group, limit, marks, min(console.width, _WIDEST))
            console.print()
            for line in drawing.lines():
                console.print(line, soft_wrap=True)
        console.print()
        if measured.groups:
            print_wrapped(console, _legend(measured, marks), style="dim")
        else:
            console.print("nothing was measured")
    write_captured(captured.get().encode(encoding, "backslashreplace").decode(encoding), stream)


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """The rows of one group with their common axis, which begins at 0 and ends at `most` GiB/s."""

    group: Group
    ceiling: float | None
    most: float
    marks: _Marks
    labels: int
    columns: int
    figures: int

    @classmethod
    def of(
        cls, group: Group, ceiling_bytes_per_s: float | None, marks: _Marks, width: int
    ) -> _Drawing:
        ceiling = None if ceiling_bytes_per_s is None else in_gib_per_s(ceiling_bytes_per_s)
        counted = [row for row in group.rows if row.counts] or group.rows
        rates = [rate for row in counted for rate in row.rates]
        share = int(_LABEL_SHARE * width)
        lengths = [cell_len(_label(group, row)) for row in group.rows]
        labels = max((length for length in lengths if length <= share), default=0)
        figures = max(cell_len(text) for row in group.rows for text in _figures(row))
        return cls(
            group=group,
            ceiling=ceiling,
            most=max(*rates, ceiling or 0.0),
            marks=marks,
            labels=labels,
            columns=max(_LEAST, width - labels - figures - 2 * _GAP),
            figures=figures,
        )

    def lines(self) -> Iterator[Text]:
        """Yield the axis and the lines of each row."""
        yield self._title()
        yield Text(" " * (self.labels + _GAP) + self._axis(), style="dim")
        for row in self.group.rows:
            label = _label(self.group, row)
            if cell_len(label) > self.labels:
                width = self.labels + self.columns + self.figures
                yield from (Text(line) for line in wrapped(label, width, "  ").split("\n"))
                label = ""
            median, interval = _figures(row)
            style = row.colour if row.counts else "dim"
            yield self._line(label, self._dots(row), median, style)
            yield self._line("", self._spread(row), interval, "" if row.counts else "bold red")

    def _title(self) -> Text:
        """Return what is compared, and fio's rate with its mark in its column."""
        title = Text(f"{self.group.name}, GiB/s", style="bold")
        if self.ceiling is None:
            return title
        column = self.labels + _GAP + self._at(self.ceiling)
        left, right = f"fio {self.ceiling:.2f} ", f" fio {self.ceiling:.2f}"
        if len(title) + _GAP + len(left) <= column:
            return title.append(f"{left:>{column - len(title)}}{self.marks.ceiling}")
        return title.append(f"{self.marks.ceiling:>{max(column - len(title), _GAP) + 1}}{right}")

    def _line(self, label: str, cells: Sequence[str], figure: str, style: str) -> Text:
        line = Text(label + " " * (self.labels + _GAP - cell_len(label)))
        line.append("".join(cells), style=style)
        return line.append(" " * _GAP + figure.rjust(self.figures))

    def _at(self, rate: float) -> int:
        """Return the column of a rate in GiB/s; the last one for those beyond the axis."""
        return min(round(rate / self.most * (self.columns - 1)), self.columns - 1)

    def _empty(self) -> list[str]:
        cells = [" "] * self.columns
        if self.ceiling is not None:
            cells[self._at(self.ceiling)] = self.marks.ceiling
        return cells

    def _dots(self, row: RunRow) -> list[str]:
        cells = self._empty()
        for column, count in Counter(map(self._at, row.rates)).items():
            several = str(count) if count <= _MOST else self.marks.more
            cells[column] = self.marks.dot if count == 1 else several
        if any(rate > self.most for rate in row.rates):
            cells[-1] = self.marks.beyond
        return cells

    def _spread(self, row: RunRow) -> list[str]:
        cells = self._empty()
        bounds = row.summary.ci95_bytes_per_s
        if bounds is not None:
            low, high = (self._at(in_gib_per_s(one)) for one in bounds)
            cells[low : high + 1] = self.marks.bar * (high + 1 - low)
            cells[low], cells[high] = self.marks.low, self.marks.high
        cells[self._at(in_gib_per_s(row.summary.median_bytes_per_s))] = self.marks.median
        return cells

    def _axis(self) -> str:
        """Return the figures of the axis: 0 and multiples of 1, 2 or 5 times a power of ten."""
        least = self.most * _TICK_COLUMNS / self.columns
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
        decimals = max(0, -math.floor(math.log10(step)))
        line = ""
        for number in range(math.floor(self.most / step) + 1):
            text = f"{number * step:.{decimals}f}" if number else "0"
            line = line.ljust(self._at(number * step)) + text
        return line


def _label(group: Group, row: RunRow) -> str:
    return row.summary.label.replace(at_target("", group.target), "")


def _figures(row: RunRow) -> tuple[str, str]:
    """Return the median, and below it the interval; for a row that cannot win, its verdict."""
    bounds = row.summary.ci95_bytes_per_s
    interval = "-".join(f"{in_gib_per_s(one):.2f}" for one in bounds) if bounds else ""
    median = f"{in_gib_per_s(row.summary.median_bytes_per_s):.2f}"
    return median, interval if row.counts else row.summary.verdict


def _legend(measured: Measured, marks: _Marks) -> str:
    rows, parts = measured.rows, [f"{marks.dot} one sample, a digit several"]
    if any(len(row.rates) > _MOST for row in rows):
        parts[0] += f", {marks.more} ten or more"
    sure = interval_heading(one.repetitions for one in measured.report.summaries).replace("\n", " ")
    spread = f"{marks.low}{marks.bar}{marks.median}{marks.bar}{marks.high}"
    parts.append(f"{spread} median and {sure}")
    if not all(row.counts for row in rows):
        parts.append(f"{marks.beyond} beyond the axis, of a row that does not count")
    return "; ".join(parts)


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
