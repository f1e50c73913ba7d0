"""Tables of text with a heading and notes, printed on a terminal or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "Grid",
    "console_for",
    "escape",
    "kept_columns",
    "print_grid",
    "print_wrapped",
    "row",
    "write_captured",
    "write_grids_as_markdown",
    "write_grids_as_table",
]

_NO_TERMINAL_WIDTH = 1000  # breaks no line: programs that read the text break lines themselves
_GAP = 2  # between columns


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns and rows of a table. A column is a header and whether its cells are figures.

    A header may be broken only at its line break. `drop` has the positions of the columns that a
    narrow terminal leaves out, in the order in which they are dropped. `styles` has a style for
    the last cell of each row.
    """

    columns: tuple[tuple[str, bool], ...]
    rows: list[list[str]]
    drop: tuple[int, ...] = ()
    styles: tuple[str, ...] = ()


def write_grids_as_table(
    heading: Iterable[str], grids: Iterable[Grid], notes: Iterable[str], stream: TextIO
) -> None:
    """Write heading, tables and notes to `stream`; cut nothing if it is not a terminal."""
    console = console_for(stream)
    with console.capture() as captured:
        for line in heading:
            print_wrapped(console, line, style="bold")
        for grid in grids:
            console.print()
            print_grid(console, grid)
        console.print()
        for note in notes:
            print_wrapped(console, note)
    write_captured(captured.get(), stream)


def console_for(stream: TextIO) -> Console:
    """Return a console that prints plain text to `stream`, as wide as its terminal."""
    width = None if stream.isatty() else _NO_TERMINAL_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def write_captured(text: str, stream: TextIO) -> None:
    """Write the captured `text` of a console without spaces at the ends of lines."""
    stream.writelines(f"{line.rstrip()}\n" for line in text.splitlines())


def print_wrapped(
    console: Console,
    text: str,
    *,
    indent: str = "",
    style: str = "",
    label: str = "",
    whole: bool = False,
) -> None:
    """Print `text` wrapped between words, never within one; indent the lines after the first.

    `label` is the start of the text and is shown in a colour. A `whole` text is not wrapped.
    """
    lines = (
        [text]
        if whole
        else textwrap.wrap(
            text,
            console.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
    shown = Text("\n".join(lines), style=style)
    shown.stylize("bold cyan", 0, len(label))
    console.print(shown, soft_wrap=True)


def print_grid(console: Console, grid: Grid) -> None:
    """Print the table with the columns that fit, then the names of the columns left out."""
    kept = kept_columns(grid, console.width)
    narrow = len(kept) < len(grid.columns) or _width(grid, kept, broken=False) > console.width
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for position in kept:
        name, figure = grid.columns[position]
        table.add_column(
            name if narrow else name.replace("\n", " "),
            justify="right" if figure else "left",
            no_wrap=figure,
            overflow="fold",
        )
    for number, cells in enumerate(grid.rows):
        texts = [Text(cell) for cell in cells]
        if grid.styles:
            texts[-1].stylize(grid.styles[number])
        table.add_row(*(texts[position] for position in kept))
    console.print(table)
    left_out = [name for i, (name, _) in enumerate(grid.columns) if i not in kept]
    if left_out:
        names = ", ".join(" ".join(name.split()) for name in left_out)
        print_wrapped(console, f"a wider terminal also shows: {names}", style="dim")


def kept_columns(grid: Grid, width: int) -> list[int]:
    """Return the positions of the columns that fit in `width`, dropped in order of `grid.drop`."""
    kept = list(range(len(grid.columns)))
    for position in grid.drop:
        if _width(grid, kept, broken=True) <= width:
            break
        kept.remove(position)
    return kept


def _width(grid: Grid, kept: Sequence[int], *, broken: bool) -> int:
    """Return the width of the table with the columns `kept`, and with or without broken headers."""
    total = _GAP * (len(kept) - 1)
    for position in kept:
        name = grid.columns[position][0]
        header = name.split("\n") if broken else [name.replace("\n", " ")]
        total += max(cell_len(text) for text in (*header, *(row[position] for row in grid.rows)))
    return total


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


def row(values: Iterable[str]) -> str:
    """Return `values` as a row of a Markdown table."""
    return f"| {' | '.join(escape(value) for value in values)} |"


def escape(text: str) -> str:
    """Return `text` on one line, with `\\`, `|`, `*`, `_`, `<` and backquotes escaped."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
