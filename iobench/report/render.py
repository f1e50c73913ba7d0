"""The formats of a report, by name; each is one module, imported when it is asked for."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from iobench.report.summary import Report

__all__ = ["ReportFormat", "render"]


class ReportFormat(StrEnum):
    """What `--format` takes."""

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


def render(report: Report, format: ReportFormat | str, stream: TextIO) -> None:  # noqa: A002 -- the option's name
    """Write `report` to `stream`. Raises ValueError for a name that is not a ReportFormat."""
    module = import_module(f"iobench.report.{_MODULES[ReportFormat(format)]}")
    module.write(report, stream)
