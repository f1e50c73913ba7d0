"""`iobench reproduce`: a published claim, measured here, and an honest answer."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from iobench.results import ResultFile
    from iobench.train.reproduction import Study


class Format(enum.StrEnum):
    """How the findings are printed."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


def reproduce(
    claim: Annotated[str, typer.Argument(help="Whose claim: hybrid-io.")],
    target: Annotated[
        str, typer.Option("--target", help="The directory to measure in.", show_default="here")
    ] = ".",
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Scale each workload to this many bytes. Default: what fits and takes about two "
            "minutes.",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Samples of each writer.")] = 7,
    results: Annotated[
        list[Path] | None,
        typer.Option("--results", help="Measure nothing; judge this record. May be repeated."),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Measure what a published claim says, and tell whether it holds here.

    Answers are yes, no, undecided (the claim lies within our interval) and not comparable, each
    with its reason and setting. hybrid-io compares writer hybrid with buffered on two workloads.
    """
    from iobench.cli.run import raise_failures
    from iobench.report.findings import write_json, write_markdown, write_table
    from iobench.results import read
    from iobench.train.reproduction import judge_records, study

    about = study(claim)
    records = (
        [read(path) for path in results] if results else _measured(about, target, size, repeat)
    )
    for record in records:
        if record.incomplete:
            typer.echo(f"warning: {record.incomplete}", err=True)
    found = judge_records(about, records)
    write = {Format.TABLE: write_table, Format.JSON: write_json, Format.MD: write_markdown}
    write[format_](about, records, found, sys.stdout)
    for record in records:
        raise_failures(record)


def _measured(about: Study, target: str, size: str | None, repeat: int) -> list[ResultFile]:
    from iobench.bench.planning import make_plan, plan_lines
    from iobench.cli.run import measure

    records = []
    for workload in about.workloads:
        plan = make_plan(
            workload=workload,
            writers=f"{about.slower},{about.faster}",
            target=target,
            size=size,
            repeat=repeat,
            ceiling=False,
        )
        for line in plan_lines(plan):
            print(line, file=sys.stderr)
        records.append(measure(plan, None))
        print(f"record: {records[-1].path}", file=sys.stderr)
    return records
