"""`iobench show`: print the report of a run from its record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import VERBOSE_HELP
from iobench.cli.servers import print_warning
from iobench.errors import UsageError
from iobench.report.render import DocumentFormat, ReportFormat, render
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.results import ResultFile


def show(
    path: Annotated[Path, typer.Argument(help="A result file: results/<run>.jsonl.")],
    format_: Annotated[
        ReportFormat, typer.Option("--format", help="How to print the report.")
    ] = ReportFormat.TABLE,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help=VERBOSE_HELP)] = False,
) -> None:
    """Print the report of a run from its result file."""
    from iobench.report.summary import summarise
    from iobench.results import read

    if verbose and format_ is not ReportFormat.TABLE:
        raise UsageError(f"-v: --format {format_} has all details; leave out -v")
    result = read(path)
    if result.incomplete:
        print_warning(printable(result.incomplete))
    if result.training:
        _show_training(result, format_, details=verbose)
        return
    render(summarise(result), format_, sys.stdout, details=verbose)


def _show_training(result: ResultFile, format_: ReportFormat, *, details: bool) -> None:
    from iobench.report.training import write

    if details or format_ is ReportFormat.CSV:
        raise UsageError("a record of iobench train is shown as table, json or md, and without -v")
    write(result, DocumentFormat(format_), sys.stdout)
