"""The formats of reports by name. A format imports its modules on first use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from iobench.report.grid import Grid
    from iobench.report.summary import Report
    from iobench.results import ResultFile

__all__ = [
    "DocumentFormat",
    "ReportFormat",
    "render",
    "write_details",
    "write_grids",
    "write_json",
    "write_result",
]


class ReportFormat(StrEnum):
    """The choices of `--format`."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


class DocumentFormat(StrEnum):
    """Formats of the verbs whose result may become part of a document."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


_MODULES = {
    ReportFormat.TABLE: "table",
    ReportFormat.CSV: "as_csv",
    ReportFormat.MD: "markdown",
}


def render(
    report: Report,
    format: ReportFormat | str,  # noqa: A002 -- the option's name
    stream: TextIO,
    *,
    details: bool = False,
) -> None:
    """Write `report` to `stream`. `details` applies to the table; other formats always have them.

    Raises ValueError for a name that is not a ReportFormat.
    """
    chosen = ReportFormat(format)
    if chosen is ReportFormat.JSON:
        write_json(report.document(), stream)
        return
    module = import_module(f"iobench.report.{_MODULES[chosen]}")
    if chosen is ReportFormat.TABLE:
        module.write(report, stream, details=details)
    else:
        module.write(report, stream)


def write_result(result: ResultFile, form: ReportFormat | str, stream: TextIO) -> None:
    """Write the report of a run's record; see `render`."""
    from iobench.report.summary import summarise

    render(summarise(result), form, stream)


def write_details(result: ResultFile, form: ReportFormat | str, stream: TextIO) -> None:
    """Write the report of a run's record with all details; see `render`."""
    from iobench.report.summary import summarise

    render(summarise(result), form, stream, details=True)


def write_json(document: Mapping[str, Any], stream: TextIO) -> None:
    """Write one document and a newline."""
    json.dump(document, stream, indent=2, allow_nan=False)
    stream.write("\n")


def write_grids(
    form: DocumentFormat,
    heading: Iterable[str],
    grids: Iterable[Grid],
    notes: Iterable[str],
    stream: TextIO,
) -> None:
    """Write heading, tables and notes for a terminal, or as Markdown."""
    from iobench.report.grid import write_grids_as_markdown, write_grids_as_table

    write = write_grids_as_markdown if form is DocumentFormat.MD else write_grids_as_table
    write(heading, grids, notes, stream)
