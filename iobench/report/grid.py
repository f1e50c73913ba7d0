"""Tables of text, and how a terminal shows them: which columns fit, and where text is wrapped."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TextIO, TypeVar

from rich.cells import cell_len

from iobench.text import printable

MISSING = "-"
"""What a cell has without a value."""
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
"""Words of a style such as `bold red`, with their codes for a terminal."""
_Row = TypeVar("_Row")
_Value = TypeVar("_Value")
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

    A header may be broken only at its line break. `drop` is its place among those that a narrow
    terminal leaves out, from 1; 0 stays. Cells of a `figure` end on one line. An `optional` column
    is shown if a row has a value. A `sentence` is wrapped first; cells are wrapped between words.
    """

    name: str
    cell: Callable[[_Row], str] = str
    drop: int = 0
    figure: bool = True
    optional: bool = False
    sentence: bool = False


def shown(value: _Value | None, form: Callable[[_Value], str]) -> str:
    """Return a cell with `value` in a form; MISSING without one."""
    return MISSING if value is None else form(value)


def span(ends: Sequence[_Value] | None, form: Callable[[_Value], str], to: str = "-") -> str:
    """Return a cell with both ends of an interval in a form; MISSING without one."""
    return to.join(map(form, ends)) if ends else MISSING


def words(*names: str, sentence: bool = False) -> tuple[Column[Any], ...]:
    """Return columns of text; with `sentence` the last one is wrapped first."""
    *others, last = (Column[Any](name, figure=False) for name in names)
    return *others, replace(last, sentence=sentence)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns and rows of a table. `styles` has a style for the last cell of each row."""

    title: str = ""
    columns: tuple[Column[Any], ...]
    rows: list[list[str]]
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
        found = [list(row) for row in zip(*(cells[one] for one in shown), strict=True)]
        return cls(title=title, columns=tuple(shown), rows=found, styles=styles)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How wide lines may be, and whether they have colours."""

    width: int = _NO_TERMINAL_WIDTH
    colours: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """Return that of `stream`. In a pipe no line is broken, and none has colours."""
        if not stream.isatty():
            return cls()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
        return cls(width=shutil.get_terminal_size().columns, colours=not plain)

    def styled(self, text: str, style: str) -> str:
        """Return `text` in a style such as `bold red`; as it is without one."""
        codes = ";".join(str(_CODES[word]) for word in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and self.colours else text

    def paragraph(
        self, text: str, *, indent: str = "", style: str = "", label: str = "", whole: bool = False
    ) -> Iterator[str]:
        """Yield `text` in lines, wrapped between words, never within one; indent all but the first.

        `label` is the start of the text and is shown in a colour. `whole` text is a command: lines
        end with a backslash, and can be pasted.
        """
        wrap = _continued if whole else wrapped
        first, *more = wrap(printable(text), self.width, indent).split("\n")
        start, rest = first[: len(label)], first[len(label) :]
        yield self.styled(start, "bold cyan" if label else "") + self.styled(rest, style)
        yield from (self.styled(line, style) for line in more)

    def table(self, grid: Grid) -> Iterator[str]:
        """Yield the table with the columns that fit, then the names of the columns left out.

        If the columns that must stay do not fit, the first column gets lines of its own. A line is
        wider than the terminal only if a single word, or a figure, leaves no other way.
        """
        columns, above, lead = list(grid.columns), False, 0
        sizes = [_Sizes(one, [row[at] for row in grid.rows]) for at, one in enumerate(columns)]
        widths = _widths(sizes, self.width)
        if len(widths) > 1 and _total(widths.values()) > self.width:
            above, lead = True, _GAP
            widths = {at + 1: w for at, w in _widths(sizes[1:], self.width - _GAP).items()}
        left_out = [
            " ".join(one.name.split()) for at, one in enumerate(columns) if at not in widths
        ]
        whole = {at: one.whole for at, one in enumerate(sizes) if at in widths}
        narrow = len(widths) + above < len(columns) or _total(whole.values()) > self.width - lead
        if above:
            yield from self.paragraph(left_out.pop(0), style="bold")
        names = [one.name if narrow else one.name.replace("\n", " ") for one in columns]
        widths = widths if narrow else whole
        header = [name.split("\n") for name in names]
        for name, _ in _lines(grid, widths, header, lead, header=True):
            yield self.styled(name, "bold")
        yield "─" * (lead + _total(widths.values()))
        for number, cells in enumerate(grid.rows):
            parts = [
                wrapped(cell, widths[position]).split("\n")
                if position in widths and _cell_width(cell) > widths[position]
                else [cell]
                for position, cell in enumerate(map(printable, cells))
            ]
            if above:
                yield from self.paragraph(cells[0])
            style = grid.styles[number] if grid.styles else ""
            for line, last in _lines(grid, widths, parts, lead):
                yield line[:last] + self.styled(line[last:], style)
        if left_out:
            shown = ", ".join(dict.fromkeys(left_out))
            yield from self.paragraph(f"a wider terminal also shows: {shown}", style="dim")


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
            line += pad if grid.columns[position].figure else ""
            begin = len(line) if position == last else 0
            line += text if grid.columns[position].figure else text + pad
        yield line.rstrip(), begin


class _Sizes:
    """Widths of a column: `whole` with its header on one line, `natural` with a broken header, and
    the `least` in which no word is broken."""

    def __init__(self, column: Column[Any], cells: Sequence[str]) -> None:
        self.column = column
        header = max(map(_cell_width, column.name.split("\n")))
        self.natural = max([header, *map(_cell_width, cells)])
        self.whole = max(self.natural, _cell_width(column.name.replace("\n", " ")))
        self.least = max([header, *(_cell_width(word) for cell in cells for word in cell.split())])


def _widths(sizes: Sequence[_Sizes], width: int) -> dict[int, int]:
    """Return the widths of the columns that fit, by position.

    Columns are dropped in their order where the others do not fit with narrow sentences. Then
    sentences become as narrow as they must be, and after them other text.
    """
    kept = {
        at: min(one.natural, max(_SENTENCE_WIDTH, one.least))
        if one.column.sentence
        else one.natural
        for at, one in enumerate(sizes)
    }
    droppable = sorted((one.column.drop, at) for at, one in enumerate(sizes) if one.column.drop)
    for _, at in droppable:
        if _total(kept.values()) > width:
            del kept[at]
    widths = {at: sizes[at].natural for at in kept}
    for sentences in (True, False):
        group = [at for at in widths if sizes[at].column.sentence >= sentences]
        group = [at for at in group if not sizes[at].column.figure]
        while _total(widths.values()) > width:
            wide = [at for at in group if widths[at] > sizes[at].least]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _cell_width(text: str) -> int:
    """Return the columns that `text` takes on a terminal; rich knows those of other scripts."""
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)
