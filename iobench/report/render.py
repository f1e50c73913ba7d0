"""Renderers of a Document: terminal, Markdown, CSV, JSON, and HTML by `page/html.py`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from iobench.units import count_of

if TYPE_CHECKING:
    from iobench.report.document import Document, Line
    from iobench.report.grid import Grid, Screen


ReportFormat = Literal["table", "json", "csv", "md", "html"]
"""How to print what a verb has found; a page has charts."""


def render(document: Document, form: str, stream: TextIO, *, details: bool = False) -> None:
    """Write `document` in a ReportFormat. Only the table can leave its details out."""
    match form:
        case "json":
            write_json(document.data, stream)
        case "md":
            stream.writelines(f"{line}\n" for line in _markdown(document))
        case "csv":
            _write_csv(document, stream)
        case "html":
            from iobench.report.page.html import html

            stream.write(f"{html(document)}\n".encode("utf-8", "backslashreplace").decode())
        case "table":
            _write_text(document, stream, details=details)


def write_json(document: Mapping[str, Any], stream: TextIO) -> None:
    """Write one document and a newline."""
    json.dump(document, stream, indent=2, allow_nan=False)
    stream.write("\n")


def _write_csv(document: Document, stream: TextIO) -> None:
    """Write the rows of the JSON document, unrounded; a value that a row lacks is empty."""
    rows = [dict(_flat(one)) for one in document.data[document.rows]]
    names = dict.fromkeys(name for row in rows for name in row)
    parents = {name.rpartition(".")[0] for name in names}
    columns = [name for name in names if name not in parents]
    writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value by its name: `phases_s.sync` of a nested one, `ci95.low` of an interval."""
    for key, value in values.items():
        name = f"{within}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple) and "ci95" in key:
            yield from zip((f"{name}.low", f"{name}.high"), value, strict=True)
        else:
            yield name, "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _write_text(document: Document, stream: TextIO, *, details: bool) -> None:
    """Write the answer, the tables and the notes; text for a pipe is plain and uncut."""
    from iobench.report.grid import Screen

    lines = list(_text(document, Screen.of(stream), details=details))
    while lines and not lines[-1]:
        lines.pop()
    stream.writelines(f"{line.rstrip()}\n" for line in lines)


def _text(document: Document, screen: Screen, *, details: bool) -> Iterator[str]:
    more = document.details
    yield from _answer(document.answer, screen)
    yield from screen.paragraph(document.title, style="bold")
    for line in document.about if details or not more else ():
        yield from screen.paragraph(line)
    for grid in (*document.tables, *(more.tables if details else ())):
        yield ""
        if grid.title:
            yield from screen.paragraph(grid.title, style="bold")
        yield from screen.table(grid)
    yield ""
    for note in (*document.notes, *(more.notes if details else ())):
        yield from screen.paragraph(note, indent="  ")
    if more and not details:
        names = ["machine", *(grid.title for grid in more.tables)]
        names += [count_of(len(more.notes), "note")] if more.notes else []
        hidden = f"-v adds {', '.join(names[:-1])} and {names[-1]}"
        yield from screen.paragraph(hidden, style="dim")


def _answer(lines: Sequence[Line], screen: Screen) -> Iterator[str]:
    width = max((len(one.subject) for one in lines), default=0) + 2
    for one in lines:
        for number, text in enumerate(one.texts):
            first = f"{one.subject}:" if number == 0 else ""
            line = f"{first:<{width}}{text}"
            yield from screen.paragraph(line, indent=" " * width, label=first, whole=one.commands)
    if lines:
        yield ""


def _markdown(document: Document) -> Iterator[str]:
    yield from (f"**{_escape(line)}**  " for line in (document.title, *document.about))
    if document.answer:
        yield ""
    for one in document.answer:
        yield from (f"- {_escape(one.subject)}: {_escape(text)}" for text in one.texts)
    for grid in (*document.tables, *document.details.tables):
        yield ""
        if grid.title:
            yield from (f"**{_escape(grid.title)}**", "")
        yield from markdown_table(grid)
    notes = (*document.notes, *document.details.notes)
    if notes:
        yield ""
    yield from (f"- {_escape(note)}" for note in notes)


def markdown_table(grid: Grid) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield _row(one.name for one in grid.columns)
    yield _row("---:" if one.figure else "---" for one in grid.columns)
    yield from map(_row, grid.rows)


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(_escape(value) for value in values)} |"


def _escape(text: str) -> str:
    """Return `text` on one line, with `\\`, `|`, `*`, `_`, `<` and backquotes escaped."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
