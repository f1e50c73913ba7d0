"""`iobench train --optimizer`: optimizers side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import given
from iobench.cli.servers import preparing, print_plan
from iobench.errors import DataMismatchError, UsageError
from iobench.report.render import DocumentFormat
from iobench.units import parse_size

if TYPE_CHECKING:
    from iobench.train.comparison import MeasuredOptimizer, OptimizerComparison

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
_USED_TOO = ("format_", "quiet")


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
    form: DocumentFormat,
    quiet: bool,
) -> None:
    """Measure and print. Raises DataMismatchError when the optimizers disagree."""
    without = [option for name, option in given(ctx) if name not in (*_USED, *_USED_TOO)]
    if without:
        raise UsageError(f"{', '.join(without)}: no effect with --optimizer; leave it out")
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
    found = measure_optimizers(about, quiet=quiet)
    from iobench.report.optimizers import write

    write(about, found, form, sys.stdout)
    raise_optimizer_differences(found)


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


def measure_optimizers(about: OptimizerComparison, *, quiet: bool) -> list[MeasuredOptimizer]:
    """Print the plan, train, and return what was measured."""
    if quiet:
        return about.run(lambda _: None)
    print_plan(about.lines())
    return about.run(lambda what: print(what, file=sys.stderr))


def raise_optimizer_differences(found: list[MeasuredOptimizer]) -> None:
    """Raise DataMismatchError when losses or restored parameters differ."""
    wrong = [one.name for one in found if not one.losses_equal]
    wrong += [f"{one.name} {r.method}" for one in found for r in one.restores if not r.equal]
    if wrong:
        raise DataMismatchError(f"results differ: {', '.join(wrong)}")
