"""Tables of text with a heading and notes, printed on a terminal or as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = [
    "Grid",
    "console_for",
    "kept_columns",
    "print_grid",
    "print_wrapped",
    "wrapped",
    "write_captured",
    "write_grids_as_markdown",
    "write_grids_as_table",
]

_NO_TERMINAL_WIDTH = 1000  # breaks no line: programs that read the text break lines themselves
_GAP = 2  # between columns
_SENTENCE_WIDTH = 24  # of a column of sentences, before a column is dropped for it
_NO_BREAK = "\xa0"
_FIGURE = re.compile(
    r"\d+ min \d+ s\b|\d+ h \d+ min\b|[\d.,]+ GiB/s \([\d.,]+ GB/s\)"
    r"|[\d.,]+ (?:[KMGT]i?B(?:/s)?|B|ms|s|min|h)(?![\w/])"
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns and rows of a table. A column is a header and whether its cells are figures.

    A header may be broken only at its line break. `drop` has the positions of the columns that a
    narrow terminal leaves out, in the order in which they are dropped. `sentences` has the
    positions of the columns that are wrapped first; cells are wrapped between words only. `styles`
    has a style for the last cell of each row.
    """

    columns: tuple[tuple[str, bool], ...]
    rows: list[list[str]]
    drop: tuple[int, ...] = ()
    sentences: tuple[int, ...] = ()
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

    `label` is the start of the text and is shown in a colour. `whole` text is a command: lines end
    with a backslash, and can be pasted.
    """
    make = _continued if whole else wrapped
    lines = make(text, console.width, indent)
    shown = Text(lines, style=style)
    shown.stylize("bold cyan", 0, len(label))
    console.print(shown, soft_wrap=True)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Return `text` in lines of `width`, or longer where a single word is longer.

    A figure stays on one line with its unit.
    """
    lines = textwrap.wrap(
        _FIGURE.sub(lambda found: found[0].replace(" ", _NO_BREAK), text),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _continued(command: str, width: int, indent: str) -> str:
    """Return a command in lines that begin with an option, if it is wider than `width`."""
    if cell_len(command) <= width or "'" in command:  # quotes may contain " --"
        return command
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if cell_len(f"{lines[-1]} --{option} \\") > width:
            lines[-1] += " \\"
            lines.append(f"{indent}  --{option}")
        else:
            lines[-1] += f" --{option}"
    return "\n".join(lines)


def print_grid(console: Console, grid: Grid) -> None:
    """Print the table with the columns that fit, then the names of the columns left out.

    If the columns that must stay do not fit, the first column gets lines of its own. A line is
    wider than the terminal only if a single word, or a figure, leaves no other way.
    """
    kept = kept_columns(grid, console.width)
    if len(kept) == 1 or _total(_widths(grid, kept, console.width).values()) <= console.width:
        _print_columns(console, grid)
        return
    first, *others = grid.columns
    rest = Grid(
        columns=tuple(others),
        rows=[row[1:] for row in grid.rows],
        drop=tuple(position - 1 for position in grid.drop if position > 0),
        sentences=tuple(position - 1 for position in grid.sentences if position > 0),
        styles=grid.styles,
    )
    _print_columns(console, rest, [" ".join(first[0].split()), *(row[0] for row in grid.rows)])


def _print_columns(console: Console, grid: Grid, above: Sequence[str] = ()) -> None:
    """Print the table. `above` are lines above the header and each row, which are then indented."""
    width = console.width - (_GAP if above else 0)
    kept = kept_columns(grid, width)
    unbroken = {position: _natural(grid, position, broken=False) for position in kept}
    narrow = len(kept) < len(grid.columns) or _total(unbroken.values()) > width
    widths = _widths(grid, kept, width) if narrow else unbroken
    names = [name if narrow else name.replace("\n", " ") for name, _ in grid.columns]
    lead = console.width - width
    if above:
        print_wrapped(console, above[0], style="bold")
    _print_row(console, grid, widths, [name.split("\n") for name in names], lead, header="bold")
    console.print("─" * (lead + _total(widths.values())), soft_wrap=True)
    for number, cells in enumerate(grid.rows):
        parts = [
            wrapped(cell, widths[position]).split("\n")
            if position in widths and cell_len(cell) > widths[position]
            else [cell]
            for position, cell in enumerate(cells)
        ]
        if above:
            print_wrapped(console, above[number + 1])
        style = grid.styles[number] if grid.styles else ""
        _print_row(console, grid, widths, parts, lead, last=style)
    left_out = [" ".join(name.split()) for i, (name, _) in enumerate(grid.columns) if i not in kept]
    if left_out:
        shown = ", ".join(dict.fromkeys(left_out))
        print_wrapped(console, f"a wider terminal also shows: {shown}", style="dim")


def _print_row(
    console: Console,
    grid: Grid,
    widths: Mapping[int, int],
    cells: Sequence[Sequence[str]],
    lead: int,
    *,
    header: str = "",
    last: str = "",
) -> None:
    """Print cells of several lines each, behind `lead` spaces.

    The cells of a header end on one line, other cells begin on one.
    """
    height = max(len(cells[position]) for position in widths)
    for number in range(height):
        line = Text(" " * lead)
        for position, width in widths.items():
            own = cells[position]
            at = number - (height - len(own)) if header else number
            text = own[at] if 0 <= at < len(own) else ""
            pad = " " * (width - cell_len(text))
            figure = grid.columns[position][1]
            style = last if position == len(grid.columns) - 1 else ""
            line.append(" " * _GAP if position != next(iter(widths)) else "")
            line.append(pad if figure else "")
            line.append(text, header or style)
            line.append("" if figure else pad)
        line.rstrip()
        console.print(line, soft_wrap=True)


def kept_columns(grid: Grid, width: int) -> list[int]:
    """Return the positions of the columns that fit in `width`, dropped in order of `grid.drop`."""
    needed = {}
    for position in range(len(grid.columns)):
        natural = _natural(grid, position, broken=True)
        least = max(_SENTENCE_WIDTH, _least(grid, position))
        needed[position] = min(natural, least) if position in grid.sentences else natural
    for position in grid.drop:
        if _total(needed.values()) <= width:
            break
        del needed[position]
    return list(needed)


def _widths(grid: Grid, kept: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column: sentences become narrow first, then other text."""
    widths = {position: _natural(grid, position, broken=True) for position in kept}
    texts = [position for position in kept if not grid.columns[position][1]]
    for group in (set(grid.sentences) & set(kept), set(texts)):
        least = {position: _least(grid, position) for position in group}
        while _total(widths.values()) > width:
            wide = [position for position in group if widths[position] > least[position]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _natural(grid: Grid, position: int, *, broken: bool) -> int:
    """Return the width of a column whose cells are not wrapped."""
    name = grid.columns[position][0]
    header = name.split("\n") if broken else [name.replace("\n", " ")]
    return max(map(cell_len, (*header, *(cells[position] for cells in grid.rows))))


def _least(grid: Grid, position: int) -> int:
    """Return the width of the longest word of a column, and of its header."""
    header = grid.columns[position][0].split("\n")
    words = (word for cells in grid.rows for word in cells[position].split())
    return max(map(cell_len, (*header, *words)))


def _total(widths: Collection[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def write_grids_as_markdown(
    heading: Iterable[str], grids: Iterable[Grid], notes: Iterable[str], stream: TextIO
) -> None:
    """Write a heading, the tables and a list of notes."""
    lines = [f"**{_escape(line)}**  " for line in heading]
    for grid in grids:
        names = (name.replace("\n", " ") for name, _ in grid.columns)
        lines += ["", _row(names), _row("---:" if figure else "---" for _, figure in grid.columns)]
        lines += [_row(cells) for cells in grid.rows]
    lines += ["", *(f"- {_escape(note)}" for note in notes)]
    stream.writelines(f"{line}\n" for line in lines)


def _row(values: Iterable[str]) -> str:
    """Return `values` as a row of a Markdown table."""
    return f"| {' | '.join(_escape(value) for value in values)} |"


def _escape(text: str) -> str:
    """Return `text` on one line, with `\\`, `|`, `*`, `_`, `<` and backquotes escaped."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
