"""The report as a terminal table, plain and uncut when it is not a terminal that it goes to."""

from __future__ import annotations

from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from iobench.bench.judging.verdict import VerdictStatus
from iobench.report.summary import Report
from iobench.report.wording import (
    COLUMNS,
    cells,
    columns,
    environment_line,
    footnotes,
    heading,
    labels_of,
    phases,
)

_STYLES = {
    VerdictStatus.VALID: "green",
    VerdictStatus.SCALED: "yellow",
    VerdictStatus.INVALID: "bold red",
    VerdictStatus.FAILED: "bold red",
}
_NO_TERMINAL_WIDTH = 1000  # wide enough to break no line: what reads it breaks lines by itself
_PHASES = next(i for i, (name, _) in enumerate(COLUMNS) if name.startswith("phases"))
_WIDTH_FOR_PHASES = 130


def write(report: Report, stream: TextIO) -> None:
    """Write heading, table and notes to `stream`; phases stand below it in a narrow terminal."""
    width = None if stream.isatty() else _NO_TERMINAL_WIDTH
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    narrow = console.width < _WIDTH_FOR_PHASES
    with console.capture() as captured:
        console.print(heading(report), style="bold", soft_wrap=True)
        console.print(environment_line(report), soft_wrap=True)
        console.print()
        console.print(_table(report, narrow) if report.summaries else "nothing was measured")
        console.print()
        if narrow:
            _phase_lines(report, console)
        for note in footnotes(report):
            console.print(note, soft_wrap=width is not None)
    stream.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _table(report: Report, narrow: bool) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    shown = [i for i in columns(report) if not (narrow and i == _PHASES)]
    for i in shown:
        name, figure = COLUMNS[i]
        header = name if narrow else name.replace("\n", " ")
        table.add_column(
            header,
            justify="right" if figure else "left",
            no_wrap=figure or name == "operation",
            overflow="fold",
        )
    for label, summary in zip(labels_of(report), report.summaries, strict=True):
        row = [Text(cell) for cell in cells(label, summary)]
        row[-1].stylize(_STYLES[VerdictStatus(summary.verdict)])
        table.add_row(*(row[i] for i in shown))
    return table


def _phase_lines(report: Report, console: Console) -> None:
    for label, summary in zip(labels_of(report), report.summaries, strict=True):
        console.print(f"{label} {summary.operation}: {phases(summary)} s")
