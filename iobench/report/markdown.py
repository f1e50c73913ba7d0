"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from typing import TextIO

from iobench.report.grid import write_grids_as_markdown
from iobench.report.summary import Report
from iobench.report.wording import environment_line, footnotes, grid, heading

__all__ = ["write"]


def write(report: Report, stream: TextIO) -> None:
    """Write heading, machine, the table with all details and a list of notes."""
    about = (heading(report), environment_line(report))
    write_grids_as_markdown(about, [grid(report, details=True)], footnotes(report), stream)
