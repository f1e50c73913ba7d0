"""`--format` of the verbs that print a table or JSON."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

__all__ = ["Format", "FormatOption"]


class Format(enum.StrEnum):
    """What `--format` takes."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print it.")]
