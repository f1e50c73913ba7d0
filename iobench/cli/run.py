"""`iobench run`: save and restore a workload's checkpoint by each writer, and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import (
    DEFAULT_WORKLOAD,
    HERE,
    QuietOption,
    WorkloadArgument,
    WorkloadOption,
    check_effect,
    check_output,
    check_target,
    preparing,
    print_plan,
    quiet_stdout,
    the_workload,
)
from iobench.cli.launched import launched
from iobench.cli.pages import Shown
from iobench.errors import ContenderError, DataMismatchError, UsageError
from iobench.formats.collector import collector_paused
from iobench.report.render import ReportFormat
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.bench.judging.rules import Rules
    from iobench.bench.plan import Plan
    from iobench.bench.ranks.start import Launched
    from iobench.results import ResultFile

_FILES, _S3, _USUAL = "buffered,odirect,hybrid", "s3", "buffered"
_RULED = (
    *("repeat", "aa", "restore_as", "restore_mode", "slices", "background", "duration", "until"),
)


def run(
    ctx: typer.Context,
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    writer: str | None = None,
    target: list[str] | None = None,
    s3_local: bool = False,
    size: str | None = None,
    repeat: str = "6",
    duration: str | None = None,
    until: str | None = None,
    max_bytes: str | None = None,
    aa: bool = False,
    seed: int | None = None,
    serializer: str | None = None,
    granularity: str | None = None,
    restore_as: str = "same",
    numjobs: str = "1",
    restore_mode: str | None = None,
    slices: str | None = None,
    background: str = "none",
    rank: int = 0,
    rules: str | None = None,
    fio: bool = True,
    baseline: str | None = None,
    ceiling: Annotated[  # the name of --fio in the commands of older records
        bool, typer.Option("--ceiling/--no-ceiling", hidden=True)
    ] = True,
    output: Path | None = None,
    format_: ReportFormat = "table",
    verbose: bool = False,
    dry_run: bool = False,
    quiet: QuietOption = False,
) -> None:
    """Save and restore a checkpoint by each writer, and compare.

    Every save ends durable, every restore starts cold and is verified. The target is left as it
    was.

    Options:
        --writer WRITERS: Writers and peers, separated by commas, or all; NAME=VALUE sets an option
            of the one before it: odirect,threads=4,peer:torch-save [buffered,odirect,hybrid; s3
            in a bucket]
        --target TARGET: The directory to measure, or s3://bucket/prefix. Several, separated by
            commas or each with a --target, are compared. [here]
        --s3-local: Measure --writer s3 on a server of our own on 127.0.0.1 (rclone), removed at the
            end.
        --size SIZE: Scale the workload to this many bytes (4GiB): whole layers are dropped. 'full'
            for all of it. Default: what fits and takes about 90 seconds.

    How often, and in which order:
        --repeat N|auto: Samples of each writer; or auto: until no interval is wider than 5%, for
            10min at most. auto:2%,1h has other limits.
        --duration TIME: Save on and on for this time; restore once.
        --until WHEN: steady: end --duration (10min) at SNIA's steady state.
        --max-bytes SIZE: With --duration: write at most this much. [1TiB]
        --aa: Measure the first writer twice: the noise floor of the machine.
        --seed N: Seed of data and order. [random]

    What is varied, and of which rank:
        --serializer LIST: Write every file as safetensors, torch, dcp or raw (peers have their
            own), or same: as the workload has it. Several, separated by commas, are compared. [as
            the workload has them]
        --granularity LIST: Regroup the tensors into files: blob (one file), shard=5GB, layer,
            tensor, or same. Several are compared: blob,layer [as the workload has them]
        --restore-as LIST: Restore all (same), or what one of 8 tensor parallel ranks loads: tp=8.
            Several are made of each save: same,tp=8
        --numjobs N,...: Processes that save, and restore, at once, like the ranks of a node: each
            has files of its own, and the last one to end counts. Several are compared: 1,2,4
        --restore-mode LIST: How the ranks of a launcher, as replicas of the first one, restore its
            files: each reads them (all), one reads and passes on (broadcast), each reads a part
            (all-gather), or auto. Several are compared: all,broadcast [each rank has files of its
            own]
        --slices LIST: Who writes a replicated checkpoint: off = rank 0 alone; all = every rank, or
            process of --numjobs, writes an equal slice; N = N ranks of each node. Several are
            compared: off,all,1 [each rank has files of its own]
        --background LIST: What another process does at the same time: nothing (none), or restores
            of an earlier checkpoint (restore). Both are compared: none,restore
        --rank N: The rank to replay.

    Rules of the measurement:
        --rules NAME: Keep MLPerf Storage's rules for checkpointing, as far as possible: mlperf.
        --fio/--no-fio: Measure the best of four fio jobs in the same run.
        --baseline WRITER: The writer with which the others are compared, pair by pair: a name, with
            options and axes where they matter: 'odirect numjobs=1'. [peer:torch-save where it takes
            part; of several targets the first]

    Output:
        -o, --output FILE: The result file. [results/<run>.jsonl]
        --format: How to print the report; html is a page with charts.
        -v, --verbose: Add machine, phases, latencies and all notes to the table.
        --dry-run: Print the plan, bytes and expected time (by short probes).
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(launched(target[0].partition(",")[0] if target else None))
        sustained = duration is not None or until is not None
        _check_effects(ctx, format_, rules, sustained=sustained, dry_run=dry_run, ranks=ranks)
        with preparing("reading the workload and trying the writers", quiet=quiet):
            with collector_paused():  # the import of torch takes 0.15 s less
                from iobench.bench.axes import Axes
                from iobench.bench.choose import split_targets
                from iobench.bench.judging.repeat import Repeat
                from iobench.bench.judging.rules import find_rules
                from iobench.bench.planning import expected_line, make_plan, plan_lines
                from iobench.report.run import run_document
                from iobench.results import default_path

            if output is not None:
                check_output(output)
            shown = Shown(form=format_, details=verbose)
            axes = Axes.parse(
                serializer=serializer,
                granularity=granularity,
                restore_as=restore_as,
                numjobs=numjobs,
                restore_mode=restore_mode,
                slices=slices,
                background=background,
            )
            if ranks is None and axes.most_jobs == 1:
                check_effect(ctx, ("slices",), "one process saves; give --numjobs, or a launcher")
            targets = tuple(one for text in target or [HERE] for one in split_targets(text))
            for one in targets:
                check_target(one)
            if s3_local:
                targets = (stack.enter_context(_own_server(targets)),)
            kept = None if rules is None else find_rules(rules)
            default = kept.default if kept else DEFAULT_WORKLOAD
            with quiet_stdout():
                plan = make_plan(
                    workload=the_workload(workload, workload_option, default),
                    writers=_default_writers(targets, kept) if writer is None else writer,
                    target=targets,
                    size=size,
                    repeat=Repeat.sustained(duration, until, max_bytes)
                    if sustained
                    else Repeat.parse(repeat),
                    aa=aa,
                    rank=rank,
                    ceiling=fio and ceiling,
                    seed=seed,
                    baseline=baseline,
                    axes=axes,
                    rules=kept,
                    world=None if ranks is None else ranks.members.facts,
                )
            if len(plan.variants) == 1:
                check_effect(ctx, ("baseline",), "there is nothing else to compare it with")
            if output is None and not dry_run:
                check_output(output)
        if not quiet or dry_run:
            more = () if ranks is None else ranks.members.lines()
            print_plan((*plan_lines(plan), *more))
        if dry_run:
            with preparing("probing the writers"):
                line = expected_line(plan)
            print_plan([line])
            return
        path = output or default_path(plan.workload.name)
        with shown.stopped(path):
            result = measure(plan, path, ranks, quiet=quiet)
        shown.show(run_document(result), path)
        raise_failures(result)


@contextmanager
def _own_server(targets: tuple[str, ...]) -> Iterator[str]:
    """Yield the target in a local S3 server that runs during the block."""
    if targets != (HERE,):
        raise UsageError(f"--s3-local makes a target of its own; leave out --target {targets[0]}")
    from iobench.bench.targets.local_s3 import local_s3

    with local_s3() as own, own.active():
        yield f"{own.target}/run"


def _default_writers(targets: tuple[str, ...], rules: Rules | None) -> str:
    if rules is not None:  # it measures one
        return _S3 if is_s3(targets[0]) else _USUAL
    return ",".join(dict.fromkeys(_S3 if is_s3(one) else _FILES for one in targets))


def _check_effects(
    ctx: typer.Context,
    format_: ReportFormat,
    rules: str | None,
    *,
    sustained: bool,
    dry_run: bool,
    ranks: Launched | None,
) -> None:
    """Raise UsageError for options that would have no effect."""
    fio = ("fio",) if ctx.params["fio"] else ()
    world = ranks and ranks.members.facts
    started = world and f"{world.size} ranks take part, started by {world.launcher}"
    table: tuple[tuple[object, tuple[str, ...], str], ...] = (
        (not ranks, ("restore_mode",), "only the ranks of a launcher restore together"),
        (ranks, ("numjobs", "rank", "s3_local", "background"), f"{started}"),
        (rules, (*_RULED, *fio), f"--rules {rules} sets it"),
        (
            sustained,
            ("repeat", *fio),
            "--duration and --until repeat saves for a time, without fio",
        ),
        (not sustained, ("max_bytes",), "only --duration and --until have it"),
        (format_ != "table", ("verbose",), f"--format {format_} has all details"),
        (dry_run, ("format_", "verbose"), "--dry-run makes no report"),
    )
    for applies, names, why in table:
        if applies:
            check_effect(ctx, names, why)


def measure(
    plan: Plan, path: Path, ranks: Launched | None = None, *, quiet: bool = False
) -> ResultFile:
    """Run `plan` with progress on stderr, and return its record, which is in `path`."""
    from iobench.bench.runner import Runner
    from iobench.cli.progress import StderrProgress
    from iobench.results import ResultWriter, read

    with quiet_stdout(), StderrProgress(quiet=quiet) as progress, ResultWriter(path) as results:
        Runner(plan=plan, results=results, progress=progress, launched=ranks).run()
    return read(path)


def raise_failures(result: ResultFile) -> None:
    """Raise ContenderError if contenders failed, else DataMismatchError if restored data differ."""
    if result.failures:
        who = ", ".join(f"{one.setting.name} ({one.error})" for one in result.failures)
        raise ContenderError(f"failed and left out: {who}")
    wrong = sum(sample.verified.mismatches for sample in result.samples if sample.verified)
    if wrong:
        raise DataMismatchError(f"{wrong} tensors that were restored differ from what was saved")
