"""`iobench autotune`: find the best writer and its settings, and write them to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from iobench.cli.given import (
    HERE,
    FormatOption,
    QuietOption,
    WorkloadArgument,
    WorkloadOption,
    check_output,
    check_place,
    check_target,
    given,
    preparing,
    print_plan,
    quiet_stdout,
    the_workload,
)
from iobench.cli.pages import Shown, write_file
from iobench.errors import UsageError
from iobench.units import format_seconds, format_size, parse_seconds, parse_size

if TYPE_CHECKING:
    from iobench.tune.journal import Journal
    from iobench.tune.tuning import Tuning


def autotune(
    ctx: typer.Context,
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    target: str = HERE,
    output: Path = Path("writer.toml"),
    objective: Literal["save", "restore", "balanced", "stall"] = "save",
    writer: str | None = None,
    max_time: str = "3min",
    max_bytes: str = "80GiB",
    max_memory: str | None = None,
    max_cpu: float | None = None,
    size: str | None = None,
    journal: Path | None = None,
    resume: Path | None = None,
    format_: FormatOption = "table",
    dry_run: bool = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest writer and its settings; write writer.toml.

    Known settings first, then a race in rounds that drops what is shown worse, then settings near
    the leaders, then fresh samples of the best and of `buffered`. Load the file with
    iobench.load_writer("writer.toml").

    Options:
        --target TARGET: The directory to tune for, or s3://bucket/prefix. [here]
        -o, --output FILE: The new file; only --resume replaces one.
        --objective: What counts: seconds to save (durable), to restore (cold), both (balanced), or
            the stall of asynchronous saves.
        --writer WRITERS: Only these writers, separated by commas. [all that work in the target]
        --max-time TIME: No trial begins that would end after it.
        --max-bytes SIZE: Write at most this much: SSDs wear.
        --max-memory SIZE: Leave out settings that take more memory (512MiB).
        --max-cpu N: Leave out settings that take more CPU seconds per GiB (0.5).
        --size SIZE: Bytes of a checkpoint in the confirmation; the race uses 1/8 and 1/4 of it. [up
            to 1GiB, as the budget allows]
        --journal FILE: Where every measurement is kept. [results/<run>.jsonl]
        --resume FILE: Continue this journal, with the options it began with; only -o may differ.
            A complete one gives its answer and its file again.
        --dry-run: Print the space, and the most time and bytes that it takes, and end.
    """
    began_s = time.perf_counter()
    with preparing("loading torch", quiet=quiet):
        from iobench.results import default_path
        from iobench.tune.journal import Journal, TuningRequest, check_new, read_header
        from iobench.tune.tuning import Tuning

    _check_config(output)
    if output.exists() and not dry_run and resume is None:  # a resumed tuning may write it again
        raise UsageError(f"-o {output}: exists; choose another name, or remove it")
    shown = Shown(form=format_)
    if resume is not None:
        _check_alone(ctx)
        with quiet_stdout(), preparing("reading the journal", quiet=quiet):
            tuning = Tuning.resumed(read_header(resume))
        with _resumable(resume), Journal.resume(resume) as opened:
            _announce(tuning, quiet=quiet)
            held = f"journal   {resume}, {len(opened.trials)} trials in it"
            again = ": complete, so its answer is given again and nothing is measured"
            print(held + again * opened.complete, file=sys.stderr)
            _tune(tuning, opened, output, shown, began_s, quiet=quiet or opened.complete)
        return
    if journal is not None:
        check_new(journal)
    if not dry_run:
        check_output(journal, "--journal")
    check_target(target)
    with quiet_stdout(), preparing("trying the writers", quiet=quiet):
        asked = TuningRequest(
            workload=the_workload(workload, workload_option),
            target=target,
            objective=objective,
            writers=None if writer is None else [one.strip() for one in writer.split(",")],
            size_bytes=_bytes(size, "--size"),
            max_s=parse_seconds(max_time, "--max-time"),
            max_bytes=parse_size(max_bytes, "--max-bytes"),
            max_memory_bytes=_bytes(max_memory, "--max-memory"),
            max_cpu_s_per_gib=max_cpu,
        )
        tuning = Tuning.of(asked)
    _announce(tuning, quiet=quiet)
    if dry_run:
        return
    path = journal or default_path(f"tune-{tuning.workload.name}")
    tuning = tuning.judged_by(path.parent)
    with _resumable(path), Journal.create(path, tuning.header()) as opened:
        print(f"journal   {path}", file=sys.stderr)
        _tune(tuning, opened, output, shown, began_s, quiet=quiet)


def _check_config(path: Path) -> None:
    """Raise UsageError for a file that must not be replaced or cannot be created."""
    from iobench.writers.config import read_config

    check_place(path)
    if path.exists():
        try:
            read_config(path)
        except UsageError as error:
            raise UsageError(
                f"-o {path}: exists and is not a writer's file; choose another name"
            ) from error


def _check_alone(ctx: typer.Context) -> None:
    """Raise UsageError for options that are given with --resume and would have no effect."""
    kept = ("resume", "output", "format_", "quiet")
    names = [option for name, option in given(ctx) if name not in kept]
    if names:
        raise UsageError(
            f"--resume takes all but -o from its journal; leave out {', '.join(names)}"
        )


def _tune(
    tuning: Tuning, journal: Journal, output: Path, shown: Shown, began_s: float, *, quiet: bool
) -> None:
    from iobench.cli.progress import TuneProgress
    from iobench.report.tuning import tuning_document
    from iobench.tune.tuning import emit, run_tuning

    with quiet_stdout(), TuneProgress(quiet=quiet) as progress:
        outcome = run_tuning(tuning, journal, progress, began_s=began_s)
    write_file(output, emit(outcome, tuning, journal.header).encode())
    print(f'wrote     {output}: iobench.load_writer("{output}")', file=sys.stderr)
    shown.show(tuning_document(journal.path, outcome))


def _announce(tuning: Tuning, *, quiet: bool) -> None:
    if quiet:
        return
    space = tuning.space
    lines = [
        f"workload  {tuning.workload.name}, rank {tuning.asked.rank}: "
        f"{format_size(tuning.full_bytes)}, tuned with at most "
        f"{format_size(tuning.actual_bytes(tuning.largest_bytes))}",
        f"target    {tuning.target.location}",
        f"space     {space.size} settings of {', '.join(sorted(space.dimensions))}, "
        f"{len(space.known)} known ones first",
        *(f"left out  {line}" for line in space.left_out),
        f"budget    {format_seconds(tuning.asked.max_s)} and "
        f"{format_size(tuning.asked.max_bytes)} written at most, objective {tuning.objective.goal}",
        *([f"smaller   for --max-bytes: {'; '.join(less)}"] if (less := tuning.left_out()) else []),
    ]
    print_plan(lines)


@contextmanager
def _resumable(path: Path) -> Iterator[None]:
    """Print how to resume if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"go on with iobench autotune --resume {path}", file=sys.stderr)
        raise


def _bytes(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)
