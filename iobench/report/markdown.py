"""The report as Markdown, to be pasted into an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from iobench.report.summary import Report
from iobench.report.wording import (
    COLUMNS,
    cells,
    environment_line,
    footnotes,
    heading,
    labels,
)


def write(report: Report, stream: TextIO) -> None:
    """Write a heading line, the table and a list of notes."""
    lines = [
        f"**{_escape(heading(report))}**",
        "",
        _escape(environment_line(report)),
        "",
        _row(name.replace("\n", " ") for name, _ in COLUMNS),
        _row("---:" if figure else "---" for _, figure in COLUMNS),
        *(
            _row(cells(label, summary))
            for label, summary in zip(labels(report.summaries), report.summaries, strict=True)
        ),
        "",
        *(f"- {_escape(note)}" for note in footnotes(report)),
    ]
    stream.writelines(f"{line}\n" for line in lines)


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(_escape(value) for value in values)} |"


def _escape(text: str) -> str:
    """`text` on one line, its `|`, `*`, `_`, `<` and backquotes taken literally."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
