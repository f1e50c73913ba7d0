"""`iobench show`: print the report of a run from its record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    details: Annotated[
        bool,
        typer.Option("--details", help="Add the machine, the phases and all notes to the table."),
    ] = False,
    series: Annotated[
        bool,
        typer.Option(
            "--series", help="Draw the bytes over time of every sample, without the table."
        ),
    ] = False,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            help="Draw the rate of every sample, with median and interval, without the table.",
        ),
    ] = False,
) -> None:
    """Print the report of a run from its result file."""
    from iobench.report.summary import summarise
    from iobench.results import read

    if details and (series or plot or format_ is not ReportFormat.TABLE):
        raise UsageError(
            "--details applies to the table; leave out --series, --plot and other formats"
        )
    if series and plot:
        raise UsageError("--series and --plot are two drawings; give one of them")
    result = read(path)
    if result.incomplete:
        print_warning(printable(result.incomplete))
    if result.training:
        if series or plot:
            raise UsageError(
                "--series and --plot draw a record of iobench run, and this one is of iobench "
                f"train; iobench report {path} -o FILE.html draws it"
            )
        _show_training(result, format_, details=details)
        return
    if series or plot:
        if format_ is not ReportFormat.TABLE:
            name = "--series" if series else "--plot"
            raise UsageError(f"{name} is a drawing without a format; leave out --format or {name}")
        from iobench.report import plot as rates
        from iobench.report import series as over_time

        (over_time if series else rates).write(result, sys.stdout)
        return
    render(summarise(result), format_, sys.stdout, details=details)


def _show_training(result: ResultFile, format_: ReportFormat, *, details: bool) -> None:
    from iobench.report.training import write

    if details or format_ is ReportFormat.CSV:
        raise UsageError(
            "a record of iobench train is shown as table, json or md, and without --details"
        )
    write(result, DocumentFormat(format_), sys.stdout)
