"""`iobench compare`: is it slower than before?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from iobench.errors import IobenchError, RegressionError, UsageError
from iobench.report.compare_as import CompareFormat, write


def compare(
    old: Annotated[Path, typer.Argument(help="The result file of the run before.")],
    new: Annotated[Path, typer.Argument(help="The result file of the run now.")],
    threshold: Annotated[
        str, typer.Option("--threshold", help="How much slower is a regression: 5%.")
    ] = "5%",
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs that are unlike, and say in what.")
    ] = False,
    format_: Annotated[
        CompareFormat,
        typer.Option("--format", help="How to print it; md is ready for a pull request."),
    ] = CompareFormat.TABLE,
) -> None:
    """Compare two runs: better, worse or no difference shown; exit code 5 on a regression."""
    from iobench.report import compare as report
    from iobench.report.alike import unlike
    from iobench.results import read
    from iobench.units import parse_percent

    allowed = parse_percent(threshold)
    before, after = read(old), read(new)
    for result in (before, after):
        if result.incomplete:
            typer.echo(f"warning: {result.incomplete}", err=True)
    differing = unlike(before.run, after.run)
    if differing and not force:
        raise UsageError(
            f"{old} and {new} cannot be compared ({'; '.join(differing)}); --force does it anyway"
        )
    comparison = report.compare(before, after, allowed)
    if not comparison.rows and not comparison.failed:
        raise UsageError(f"{old} and {new} have no writer in common")
    write(comparison, format_, sys.stdout)
    if worse := [f"{row.setting.name} {row.operation}" for row in comparison.regressions]:
        raise RegressionError(f"slower by more than {threshold}: {', '.join(worse)}")
    if comparison.spoilt:
        raise IobenchError(
            f"VALID before, INVALID now or FAILED: {', '.join(comparison.spoilt)}; not judged"
        )
