"""Tables of text, and how a terminal shows them: which columns fit, and where text is wrapped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.control import strip_control_codes
from rich.segment import Segment, Segments
from rich.text import Text

MISSING = "-"
"""What a cell has without a value."""
_Row = TypeVar("_Row")
_NO_TERMINAL_WIDTH = 1000  # breaks no line: programs that read the text break lines themselves
_GAP = 2  # between columns
_SENTENCE_WIDTH = 24  # of a column of sentences, before a column is dropped for it
_NO_BREAK = "\xa0"
_FIGURE = re.compile(
    r"\d+ min \d+ s\b|\d+ h \d+ min\b|[\d.,]+ GiB/s \([\d.,]+ GB/s\)"
    r"|[\d.,]+ (?:[KMGT]i?B(?:/s)?|B|ms|s|min|h)(?![\w/])"
)


@dataclass(frozen=True)
class Column(Generic[_Row]):
    """A column of a table: its header, and the cell of a row, which is MISSING without a value.

    `drop` is its place among those that a narrow terminal leaves out, from 1; 0 stays. An
    `optional` column is shown if a row has a value.
    """

    name: str
    cell: Callable[[_Row], str]
    drop: int = 0
    figure: bool = True
    optional: bool = False
    sentence: bool = False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns and rows of a table. A column is a header and whether its cells are figures.

    A header may be broken only at its line break. `drop` has the positions of the columns that a
    narrow terminal leaves out, in the order in which they are dropped. `sentences` has the
    positions of the columns that are wrapped first; cells are wrapped between words only. `styles`
    has a style for the last cell of each row.
    """

    title: str = ""
    columns: tuple[tuple[str, bool], ...]
    rows: list[list[str]]
    drop: tuple[int, ...] = ()
    sentences: tuple[int, ...] = ()
    styles: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rows: Iterable[_Row],
        columns: Iterable[Column[_Row] | None],
        title: str = "",
        styles: tuple[str, ...] = (),
    ) -> Grid:
        """Return the table of `rows`; a column that is None is absent."""
        given = list(rows)
        cells = {one: [one.cell(row) for row in given] for one in columns if one is not None}
        shown = [one for one, texts in cells.items() if not one.optional or {*texts} - {MISSING}]
        dropped = sorted((one.drop, at) for at, one in enumerate(shown) if one.drop)
        return cls(
            title=title,
            columns=tuple((one.name, one.figure) for one in shown),
            rows=[list(row) for row in zip(*(cells[one] for one in shown), strict=True)],
            drop=tuple(at for _, at in dropped),
            sentences=tuple(at for at, one in enumerate(shown) if one.sentence),
            styles=styles,
        )

    @cached_property
    def cell_widths(self) -> tuple[int, ...]:
        """Width of the widest cell of each column, without its header."""
        columns = (map(_cell_width, column) for column in zip(*self.rows, strict=True))
        return tuple(map(max, columns)) if self.rows else (0,) * len(self.columns)

    @cached_property
    def word_widths(self) -> tuple[int, ...]:
        """Width of the longest word of each column, without its header."""
        return tuple(
            max((_cell_width(word) for cells in self.rows for word in cells[at].split()), default=0)
            for at in range(len(self.columns))
        )


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
    if len(text) <= width and text.isprintable() and not text.endswith(" "):
        return text
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
    header = [name.split("\n") for name in names]
    for name, _ in _lines(grid, widths, header, lead, header=True):
        console.print(Text(name, style="bold"), soft_wrap=True)
    plain = ["─" * (lead + _total(widths.values()))]
    for number, cells in enumerate(grid.rows):
        parts = [
            wrapped(cell, widths[position]).split("\n")
            if position in widths and _cell_width(cell) > widths[position]
            else [cell]
            for position, cell in enumerate(cells)
        ]
        if above:
            plain += wrapped(above[number + 1], console.width).split("\n")
        style = grid.styles[number] if grid.styles else ""
        lines = _lines(grid, widths, parts, lead)
        if not style:
            plain += [line for line, _ in lines]
            continue
        _print_plain(console, plain)
        plain = []
        for line, last in lines:
            styled = Text(line)
            styled.stylize(style, last)
            console.print(styled, soft_wrap=True)
    _print_plain(console, plain)
    left_out = [" ".join(name.split()) for i, (name, _) in enumerate(grid.columns) if i not in kept]
    if left_out:
        shown = ", ".join(dict.fromkeys(left_out))
        print_wrapped(console, f"a wider terminal also shows: {shown}", style="dim")


def _print_plain(console: Console, lines: Sequence[str]) -> None:
    """Print `lines` as they are. Rich takes 0.1 ms for each line of a Text."""
    if lines:
        text = strip_control_codes("\n".join(lines))
        console.print(Segments([Segment(f"{text}\n")]), soft_wrap=True)


def _lines(
    grid: Grid,
    widths: Mapping[int, int],
    cells: Sequence[Sequence[str]],
    lead: int,
    *,
    header: bool = False,
) -> Iterator[tuple[str, int]]:
    """Yield the lines of one row behind `lead` spaces, and where the last cell begins in each.

    `cells` have several lines each. Those of a header end on one line, others begin on one.
    """
    height = max(len(cells[position]) for position in widths)
    last = len(grid.columns) - 1
    for number in range(height):
        line, begin = " " * lead, 0
        for position, width in widths.items():
            own = cells[position]
            at = number - (height - len(own)) if header else number
            text = own[at] if 0 <= at < len(own) else ""
            pad = " " * (width - _cell_width(text))
            line += " " * _GAP if position != next(iter(widths)) else ""
            line += pad if grid.columns[position][1] else ""
            begin = len(line) if position == last else 0
            line += text if grid.columns[position][1] else text + pad
        yield line.rstrip(), begin


def kept_columns(grid: Grid, width: int) -> list[int]:
    """Return the positions of the columns that fit in `width`, dropped in order of `grid.drop`."""
    needed = {}
    for position in range(len(grid.columns)):
        needed[position] = _natural(grid, position, broken=True)
        if position in grid.sentences:
            least = max(_SENTENCE_WIDTH, _least(grid, position))
            needed[position] = min(needed[position], least)
    for position in grid.drop:
        if _total(needed.values()) <= width:
            break
        del needed[position]
    return list(needed)


def _widths(grid: Grid, kept: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column: sentences become narrow first, then other text."""
    widths = {position: _natural(grid, position, broken=True) for position in kept}
    if _total(widths.values()) <= width:
        return widths
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
    name = grid.columns[position][0]
    header = name.split("\n") if broken else [name.replace("\n", " ")]
    return max(*map(_cell_width, header), grid.cell_widths[position])


def _least(grid: Grid, position: int) -> int:
    header = grid.columns[position][0].split("\n")
    return max(*map(_cell_width, header), grid.word_widths[position])


def _cell_width(text: str) -> int:
    """Return the columns that `text` takes on a terminal; rich knows those of other scripts."""
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)
