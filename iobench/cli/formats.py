"""The choices of `--format`; those of reports are in `iobench.report.render`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from iobench.report.render import DocumentFormat

__all__ = ["DocumentFormatOption", "FormatOption", "ListingFormat"]


class ListingFormat(enum.StrEnum):
    """Formats of the verbs that list something."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[ListingFormat, typer.Option("--format", help="How to print it.")]
DocumentFormatOption = Annotated[DocumentFormat, typer.Option("--format", help="How to print it.")]
