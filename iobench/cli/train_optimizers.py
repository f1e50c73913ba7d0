"""`iobench train --optimizer`: optimizers side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import check_output, given
from iobench.cli.report import check_report, write_report_of
from iobench.cli.servers import preparing, print_plan
from iobench.errors import DataMismatchError, UsageError
from iobench.report.render import DocumentFormat
from iobench.units import parse_size

if TYPE_CHECKING:
    from iobench.train.comparison import OptimizerComparison
    from iobench.train.optimizer_record import OptimizerRecord

__all__ = [
    "EngineMemoryOption",
    "OptimizerOption",
    "compare_optimizers",
    "make_comparison",
    "measure_optimizers",
    "raise_optimizer_differences",
]

OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="Compare optimizers instead: offload, resident, mmap, separated by commas "
        "(docs/offload.md).",
    ),
]
EngineMemoryOption = Annotated[
    str, typer.Option("--memory", help="With --optimizer: memory of the offload engine.")
]
_USED = ("optimizer", "memory", "target", "size", "steps", "repeat", "model_params", "seed")
_USED_TOO = ("format_", "quiet", "output", "report")


def compare_optimizers(
    ctx: typer.Context,
    optimizers: str,
    *,
    target: Path,
    size: str,
    steps: int,
    repeat: int,
    model_params: int,
    memory: str,
    seed: int,
    output: Path | None,
    report: Path | None,
    form: DocumentFormat,
    quiet: bool,
) -> None:
    """Measure, print and record. Raises DataMismatchError when the optimizers disagree."""
    without = [option for name, option in given(ctx) if name not in (*_USED, *_USED_TOO)]
    if without:
        raise UsageError(f"{', '.join(without)}: no effect with --optimizer; leave it out")
    check_output(output)
    if report is not None:
        check_report(report)
    about = make_comparison(
        optimizers,
        target=target,
        size=size,
        steps=steps,
        repeat=repeat,
        model_params=model_params,
        memory=memory,
        seed=seed,
        quiet=quiet,
    )
    record, path = measure_optimizers(about, output, quiet=quiet)
    from iobench.report.optimizers import write

    write(record, form, sys.stdout)
    if report is not None:
        write_report_of([path], report)
    raise_optimizer_differences(record)


def make_comparison(
    optimizers: str,
    *,
    target: Path,
    size: str,
    steps: int,
    repeat: int,
    model_params: int,
    memory: str,
    seed: int = 0,
    quiet: bool = False,
) -> OptimizerComparison:
    """Return a checked comparison. Raises UsageError and its subclasses."""
    with preparing("loading torch", quiet=quiet):
        from iobench.bench.targets.directory import DirectoryTarget
        from iobench.train.comparison import OptimizerComparison
        from iobench.train.optimizers import optimizer_names

        about = OptimizerComparison(
            names=optimizer_names(optimizers),
            target=DirectoryTarget(path=target),
            size_bytes=parse_size(size, "--size"),
            steps=steps,
            repeat=repeat,
            model_params=model_params,
            memory=memory,
            seed=seed,
        )
        about.check()
    return about


def measure_optimizers(
    about: OptimizerComparison, output: Path | None, *, quiet: bool
) -> tuple[OptimizerRecord, Path]:
    """Print the plan, train, and write the record; return it and its file."""
    from iobench.results import default_path

    if not quiet:
        print_plan(about.lines())
    record = about.run(lambda what: None if quiet else print(what, file=sys.stderr))
    path = output or default_path("train-optimizers")
    record.write(path)
    print(f"record: {path}", file=sys.stderr)
    return record, path


def raise_optimizer_differences(record: OptimizerRecord) -> None:
    """Raise DataMismatchError when losses or restored parameters differ."""
    wrong = [one.name for one in record.optimizers if not one.losses_equal]
    for one in record.optimizers:
        wrong += [f"{one.name} {restore.method}" for restore in one.restores if not restore.equal]
    if wrong:
        raise DataMismatchError(f"results differ: {', '.join(wrong)}")
