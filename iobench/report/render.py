"""The formats of a report, by name; each is one module, imported when it is asked for."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from iobench.report.summary import Report

__all__ = ["Format", "render"]


class Format(StrEnum):
    """What `--format` takes."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


_MODULES = {
    Format.TABLE: "table",
    Format.JSON: "as_json",
    Format.CSV: "as_csv",
    Format.MD: "markdown",
}


def render(report: Report, format: Format | str, stream: TextIO) -> None:  # noqa: A002 -- the option's name
    """Write `report` to `stream`. Raises ValueError for a format that Format does not name."""
    module = import_module(f"iobench.report.{_MODULES[Format(format)]}")
    module.write(report, stream)
