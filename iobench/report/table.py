"""The report on a terminal: first the answer, then the table, then the urgent notes.

Text for a pipe is plain and uncut.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

from iobench.report.answer import answer
from iobench.report.grid import console_for, kept_columns, print_grid, print_wrapped, write_captured
from iobench.report.latency import latency_grid
from iobench.report.summary import Report
from iobench.report.wording import (
    environment_line,
    footnotes,
    grid,
    heading,
    phases,
    urgent_notes,
)
from iobench.units import count_of

__all__ = ["write"]


def write(report: Report, stream: TextIO, *, details: bool = False) -> None:
    """Write answer, heading, table and notes to `stream`.

    `details` adds the machine, the phases, the latencies and all notes. On a narrow terminal the
    phases are lines below the table.
    """
    console = console_for(stream)
    figures = grid(report, details=details)
    apart = len(kept_columns(figures, console.width)) < len(figures.columns)
    with console.capture() as captured:
        _print_answer(report, console)
        print_wrapped(console, heading(report), style="bold")
        if details:
            print_wrapped(console, environment_line(report))
        console.print()
        if report.summaries:
            print_grid(console, grid(report) if apart else figures)
        else:
            console.print("nothing was measured")
        console.print()
        if details and apart:
            _print_phases(report, console)
        if details and (latencies := latency_grid(report.summaries)):
            print_grid(console, latencies)
            console.print()
        urgent, notes = urgent_notes(report), footnotes(report)
        for note in notes if details else urgent:
            print_wrapped(console, note, indent="  ")
        hidden = [note for note in notes if note not in urgent]
        if hidden and not details:
            count = count_of(len(hidden), "note")
            print_wrapped(console, f"-v adds machine, phases, latencies and {count}", style="dim")
    write_captured(captured.get(), stream)


def _print_answer(report: Report, console: Console) -> None:
    lines = answer(report)
    width = max((len(one.subject) for one in lines), default=0) + 2
    for one in lines:
        for number, text in enumerate(one.texts):
            first = f"{one.subject}:" if number == 0 else ""
            line = f"{first:<{width}}{text}"
            print_wrapped(console, line, indent=" " * width, label=first, whole=one.commands)
    if lines:
        console.print()


def _print_phases(report: Report, console: Console) -> None:
    for one in report.summaries:
        line = f"{one.label} {one.operation}: {phases(one)} s"
        print_wrapped(console, line, indent="  ")
