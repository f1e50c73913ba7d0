"""`iobench show`: the report of a run again, from its record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from iobench.report.render import Format, render


def show(
    path: Annotated[Path, typer.Argument(help="A result file: results/<run>.jsonl.")],
    format: Annotated[Format, typer.Option(help="How to print the report.")] = Format.TABLE,  # noqa: A002 -- the option's name
) -> None:
    """Print the report of a run from its result file."""
    from iobench.report.summary import summarise
    from iobench.results import read

    result = read(path)
    if result.incomplete:
        typer.echo(f"warning: {result.incomplete}", err=True)
    render(summarise(result), format, sys.stdout)
