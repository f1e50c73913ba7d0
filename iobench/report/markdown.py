"""The report as Markdown, to be pasted into an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from iobench.report.summary import Report
from iobench.report.wording import (
    COLUMNS,
    cells,
    columns,
    environment_line,
    footnotes,
    heading,
    labels_of,
)


def write(report: Report, stream: TextIO) -> None:
    """Write a heading line, the table and a list of notes."""
    shown = columns(report)
    lines = [
        f"**{escape(heading(report))}**",
        "",
        escape(environment_line(report)),
        "",
        row(COLUMNS[i][0].replace("\n", " ") for i in shown),
        row("---:" if COLUMNS[i][1] else "---" for i in shown),
        *(
            row(cells(label, summary)[i] for i in shown)
            for label, summary in zip(labels_of(report), report.summaries, strict=True)
        ),
        "",
        *(f"- {escape(note)}" for note in footnotes(report)),
    ]
    stream.writelines(f"{line}\n" for line in lines)


def row(values: Iterable[str]) -> str:
    """`values` as a row of a table."""
    return f"| {' | '.join(escape(value) for value in values)} |"


def escape(text: str) -> str:
    """`text` on one line, its `|`, `*`, `_`, `<` and backquotes taken literally."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
