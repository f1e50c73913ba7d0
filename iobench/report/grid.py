"""Tables of text with a heading and notes, on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from iobench.report.markdown import escape, row

__all__ = ["Grid", "write_grids_as_markdown", "write_grids_as_table"]

_NO_TERMINAL_WIDTH = 1000  # wide enough to break no line: what reads it breaks lines by itself


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Headers, each with whether its cells are figures, and rows of as many cells.

    A line break in a header is where a narrow one may be broken.
    """

    columns: tuple[tuple[str, bool], ...]
    rows: list[list[str]]


def write_grids_as_table(
    heading: Iterable[str], grids: Iterable[Grid], notes: Iterable[str], stream: TextIO
) -> None:
    """Write everything to `stream`; nothing is cut when it is not a terminal."""
    width = None if stream.isatty() else _NO_TERMINAL_WIDTH
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for line in heading:
            console.print(line, style="bold", soft_wrap=True)
        for grid in grids:
            console.print()
            console.print(_rich(grid))
        console.print()
        for note in notes:
            console.print(note, soft_wrap=width is not None)
    stream.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def write_grids_as_markdown(
    heading: Iterable[str], grids: Iterable[Grid], notes: Iterable[str], stream: TextIO
) -> None:
    """Write a heading, the tables and a list of notes."""
    lines = [f"**{escape(line)}**  " for line in heading]
    for grid in grids:
        names = (name.replace("\n", " ") for name, _ in grid.columns)
        lines += ["", row(names), row("---:" if figure else "---" for _, figure in grid.columns)]
        lines += [row(cells) for cells in grid.rows]
    lines += ["", *(f"- {escape(note)}" for note in notes)]
    stream.writelines(f"{line}\n" for line in lines)


def _rich(grid: Grid) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for name, figure in grid.columns:
        table.add_column(name, justify="right" if figure else "left", overflow="fold")
    for cells in grid.rows:
        table.add_row(*map(Text, cells))
    return table
