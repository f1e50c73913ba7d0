"""The choices of `--format`, except for reports of runs (see `iobench.report.render`)."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

__all__ = ["DocumentFormat", "DocumentFormatOption", "FormatOption", "ListingFormat"]


class ListingFormat(enum.StrEnum):
    """Formats of the verbs that list something."""

    TABLE = "table"
    JSON = "json"


class DocumentFormat(enum.StrEnum):
    """Formats of the verbs whose result may become part of a document."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


FormatOption = Annotated[ListingFormat, typer.Option("--format", help="How to print it.")]
DocumentFormatOption = Annotated[DocumentFormat, typer.Option("--format", help="How to print it.")]
