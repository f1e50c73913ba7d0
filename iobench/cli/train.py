"""`iobench train`: measure the cost of checkpoints to a training loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from iobench.cli.given import (
    HERE,
    QuietOption,
    ReportFormatOption,
    WorkloadArgument,
    WorkloadOption,
    check_output,
    preparing,
    print_plan,
    the_directory,
    the_workload,
)
from iobench.cli.pages import Shown
from iobench.errors import DataMismatchError

if TYPE_CHECKING:
    from iobench.results import ResultFile
    from iobench.train.session import Session


def train(
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    writer: str = "hybrid,buffered,peer:torch-save",
    mode: str = "none,sync,async",
    budget: str | None = None,
    target: str = HERE,
    size: str = "1GiB",
    steps: int = 100,
    every: str = "20",
    repeat: int = 6,
    model_params: int = 1_000_000,
    simulate_step: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    output: Path | None = None,
    format_: ReportFormatOption = "table",
    quiet: QuietOption = False,
) -> None:
    """Measure what checkpoints cost the training of a small GPT.

    The checkpoints have the size of a workload. Each writer in each mode trains the same steps, in
    turns with training without checkpoints. Losses must be equal bit for bit, also after a resume;
    if not, the exit code is 4.

    Options:
        --writer WRITERS: Writers, and peer:torch-save and peer:dcp (stock torch), separated by
            commas; NAME=VALUE sets an option of the one before it.
        --mode LIST: none, sync, async, lazy, memory, spill; async=1 says how many snapshots memory
            holds (2). none always takes part.
        --budget LIST: Memory of the snapshots of async and lazy, also below the size of one;
            several (1GiB,4GiB) are compared.
        --target TARGET: Where to save. [here]
        --size SIZE: Scale the checkpoint to this many bytes (4GiB); 'full' for all of it.
        --steps N: Steps of a block.
        --every WHEN: Steps between two checkpoints. 20: fixed; 2xpersist: twice the measured
            persist time; 3.5%: as often as a 3.5% overhead allows (CheckFreq).
        --repeat N: Blocks of each arm.
        --model-params N: Parameters of the small GPT that is trained, 100,000 or more.
        --simulate-step: Make a step last the workload's published step time; the CPU is idle in it.
        --device: Where to train.
        -o, --output FILE: The result file. [results/<run>.jsonl]
    """
    check_output(output)
    shown = Shown(form=format_)
    directory = the_directory(target)
    with preparing("loading torch and trying the writers", quiet=quiet):
        from iobench.report.train import train_document
        from iobench.results import default_path
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
            device=device,
        )
    path = output or default_path(f"train-{session.workload.name}")
    with shown.stopped(path):
        result = measure_training(session, path, quiet=quiet)
    shown.show(train_document(result), path)
    raise_differences(result)


def measure_training(session: Session, path: Path, *, quiet: bool = False) -> ResultFile:
    """Print the plan, run the session and return its record, which is in `path`."""
    from iobench.cli.progress import StderrProgress
    from iobench.results import ResultWriter, read

    if not quiet:
        print_plan(session.lines())
    with StderrProgress(quiet=quiet) as progress, ResultWriter(path) as results:
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
