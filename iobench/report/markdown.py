"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from typing import TextIO

from iobench.report.grid import write_grids_as_markdown
from iobench.report.latency import latency_grid
from iobench.report.summary import Report
from iobench.report.wording import environment_line, footnotes, grid, heading

__all__ = ["write"]


def write(report: Report, stream: TextIO) -> None:
    """Write heading, machine, the tables with all details and a list of notes."""
    about = (heading(report), environment_line(report))
    latencies = latency_grid(report.summaries)
    grids = [grid(report, details=True), *([latencies] if latencies else [])]
    write_grids_as_markdown(about, grids, footnotes(report), stream)
