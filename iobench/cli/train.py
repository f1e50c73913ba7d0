"""`iobench train`: measure the cost of checkpoints to a training loop."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import (
    HERE,
    LARGEST_SEED,
    QuietOption,
    WorkloadArgument,
    WorkloadOption,
    check_output,
    preparing,
    print_plan,
    the_directory,
    the_workload,
)
from iobench.cli.pages import (
    ReportOption,
    check_report,
    read_stopped,
    report_stopped,
    write_report,
)
from iobench.errors import DataMismatchError
from iobench.report.render import DocumentFormat, render

if TYPE_CHECKING:
    from iobench.results import ResultFile
    from iobench.train.session import Session


class DeviceKind(enum.StrEnum):
    """The device that trains the model."""

    CPU = "cpu"
    CUDA = "cuda"


def train(
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    writer: Annotated[
        str,
        typer.Option(
            "--writer",
            help="Writers, separated by commas, NAME=VALUE sets an option of the one before it; "
            "peer:torch-save is stock torch.save.",
        ),
    ] = "hybrid,buffered,peer:torch-save",
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="none, sync, async, lazy, memory, spill; async=1 says how many snapshots memory "
            "holds (2). none always takes part.",
        ),
    ] = "none,sync,async",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Memory of the snapshots of async and lazy, also below the size of one; several "
            "(1GiB,4GiB) are compared.",
        ),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="Where to save.", show_default="here")
    ] = HERE,
    size: Annotated[
        str,
        typer.Option(
            "--size", help="Scale the checkpoint to this many bytes (4GiB); 'full' for all of it."
        ),
    ] = "1GiB",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of a block.")] = 100,
    every: Annotated[
        str,
        typer.Option(
            "--every",
            help="Steps between two checkpoints. 20: fixed; 2xpersist: twice the measured persist "
            "time; 3.5%: as often as a 3.5% overhead allows (CheckFreq).",
        ),
    ] = "20",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Blocks of each arm.")] = 6,
    model_params: Annotated[
        int,
        typer.Option(
            "--model-params", help="Parameters of the small GPT that is trained, 100,000 or more."
        ),
    ] = 1_000_000,
    simulate_step: Annotated[
        bool,
        typer.Option(
            "--simulate-step",
            help="Make a step last the workload's published step time; the CPU is idle in it.",
        ),
    ] = False,
    device: Annotated[
        DeviceKind, typer.Option("--device", help="Where to train.")
    ] = DeviceKind.CPU,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of model and data.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The result file.", show_default="results/<run>.jsonl"),
    ] = None,
    format_: Annotated[
        DocumentFormat, typer.Option("--format", help="How to print the report.")
    ] = DocumentFormat.TABLE,
    report: ReportOption = None,
    quiet: QuietOption = False,
) -> None:
    """Measure what checkpoints cost the training of a small GPT.

    The checkpoints have the size of a workload. Each writer in each mode trains the same steps, in
    turns with training without checkpoints. Losses must be equal bit for bit, also after a resume;
    if not, the exit code is 4.
    """
    check_output(output)
    if report is not None:
        check_report(report)
    directory = the_directory(target)
    with preparing("loading torch and trying the writers", quiet=quiet):
        from iobench.report.train import train_document
        from iobench.train.arm import choose_arms
        from iobench.train.session import make_session

        arms, left_out = choose_arms(writer, mode, budget)
        session = make_session(
            workload=the_workload(workload, workload_option),
            arms=arms,
            left_out=left_out,
            target=directory,
            size=size,
            steps=steps,
            every=every,
            repeat=repeat,
            model_params=model_params,
            simulate_step=simulate_step,
            device=device.value,
            seed=seed,
        )
    from iobench.results import default_path

    path = output or default_path(f"train-{session.workload.name}")
    try:
        result = measure_training(session, path, quiet=quiet)
    except BaseException:  # interrupted, or the disk is full: what was recorded is still useful
        recorded = read_stopped(path)
        if recorded is not None and recorded.training:
            render(train_document([recorded]), format_, sys.stdout)
            print(f"record: {path}", file=sys.stderr)
            report_stopped(path, report)
        raise
    document = train_document([result])
    render(document, format_, sys.stdout)
    print(f"record: {path}", file=sys.stderr)
    if report is not None:
        write_report(document, report)
    raise_differences(result)


def measure_training(session: Session, output: Path | None, *, quiet: bool = False) -> ResultFile:
    """Print the plan, run the session and return its record."""
    from iobench.cli.progress import TrainProgress
    from iobench.results import ResultWriter, default_path, read

    if not quiet:
        print_plan(session.lines())
    path = output or default_path(f"train-{session.workload.name}")
    with TrainProgress(quiet=quiet) as progress, ResultWriter(path) as results:
        session.run(results, progress)
    return read(path)


def raise_differences(result: ResultFile) -> None:
    """Raise DataMismatchError for a record in which checkpoints changed the losses."""
    wrong = {
        f"{block.writer} {block.mode}".strip()
        for block in result.training
        if not block.losses_equal or block.resumed_equal is False
    }
    if wrong:
        raise DataMismatchError(f"losses differ from those without checkpoints: {', '.join(wrong)}")
