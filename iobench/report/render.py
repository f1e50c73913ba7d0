"""The formats of a report by name. Each format is one module, imported on first use."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from iobench.report.summary import Report

__all__ = ["ReportFormat", "render"]


class ReportFormat(StrEnum):
    """The choices of `--format`."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


_MODULES = {
    ReportFormat.TABLE: "table",
    ReportFormat.JSON: "as_json",
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
    module = import_module(f"iobench.report.{_MODULES[chosen]}")
    if chosen is ReportFormat.TABLE:
        module.write(report, stream, details=details)
    else:
        module.write(report, stream)
