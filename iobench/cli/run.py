"""`iobench run`: save and restore a workload's checkpoint by each writer, and compare them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import (
    DEFAULT_WORKLOAD,
    HERE,
    LARGEST_SEED,
    VERBOSE_HELP,
    QuietOption,
    WorkloadArgument,
    WorkloadOption,
    check_effect,
    check_output,
    check_target,
    preparing,
    print_plan,
    quiet_stdout,
    server,
    the_workload,
)
from iobench.cli.launched import launched
from iobench.cli.pages import (
    REPORT_HELP,
    check_report,
    read_stopped,
    report_stopped,
    write_report,
)
from iobench.errors import ContenderError, DataMismatchError
from iobench.formats.collector import collector_paused
from iobench.report.render import ReportFormat, render
from iobench.units import format_size, parse_size
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.bench.judging.rules import Rules
    from iobench.bench.plan import Plan
    from iobench.bench.ranks.group import Launched
    from iobench.report.document import Document
    from iobench.results import ResultFile
    from iobench.workloads import Workload

__all__ = [
    "nearest_sizes_line",
]

_FILES, _S3, _USUAL = "buffered,odirect,hybrid", "s3", "buffered"
_RULED = (
    *("repeat", "precision", "max_time", "aa", "restore_as", "restore_mode", "slices"),
    *("background", "duration", "until"),
)
_often_option = partial(typer.Option, rich_help_panel="How often, and in which order")
_axis_option = partial(typer.Option, rich_help_panel="What is varied, and of which rank")
_rule_option = partial(typer.Option, rich_help_panel="Rules of the measurement")
_output_option = partial(typer.Option, rich_help_panel="Output")


def run(
    ctx: typer.Context,
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    writer: Annotated[
        str | None,
        typer.Option(
            "--writer",
            show_default="buffered,odirect,hybrid; s3 in a bucket",
            help="Writers and peers, separated by commas, or all; NAME=VALUE sets an option of the "
            "one before it: odirect,threads=4,peer:torch-save",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="The directory to measure, or s3://bucket/prefix. Several, separated by commas "
            "or each with a --target, are compared.",
            show_default="here",
        ),
    ] = None,
    s3_local: Annotated[
        bool,
        typer.Option(
            "--s3-local",
            help="Measure --writer s3 on a server of our own on 127.0.0.1 (rclone), removed at the "
            "end.",
        ),
    ] = False,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Scale the workload to this many bytes (4GiB): whole layers are dropped. "
            "'full' for all of it. Default: what fits and takes about 90 seconds.",
        ),
    ] = None,
    repeat: Annotated[
        str,
        _often_option(
            "--repeat", help="Samples of each writer, or auto: until --precision or --max-time."
        ),
    ] = "6",
    precision: Annotated[
        str, _often_option("--precision", help="With --repeat auto: how wide an interval may be.")
    ] = "5%",
    max_time: Annotated[
        str, _often_option("--max-time", help="With --repeat auto: no repetition begins after it.")
    ] = "10min",
    duration: Annotated[
        str | None, _often_option("--duration", help="Save on and on for this time; restore once.")
    ] = None,
    until: Annotated[
        str | None,
        _often_option("--until", help="steady: end --duration (10min) at SNIA's steady state."),
    ] = None,
    max_bytes: Annotated[
        str | None,
        _often_option(
            "--max-bytes", help="With --duration: write at most this much.", show_default="1TiB"
        ),
    ] = None,
    aa: Annotated[
        bool,
        _often_option(
            "--aa", help="Measure the first writer twice: the noise floor of the machine."
        ),
    ] = False,
    seed: Annotated[
        int | None,
        _often_option(
            "--seed", min=0, max=LARGEST_SEED, help="Seed of data and order.", show_default="random"
        ),
    ] = None,
    serializer: Annotated[
        str | None,
        _axis_option(
            "--serializer",
            help="Write every file as safetensors, torch, dcp or raw (peers have their own), or "
            "same: as the workload has it. Several, separated by commas, are compared.",
            show_default="as the workload has them",
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        _axis_option(
            "--granularity",
            help="Regroup the tensors into files: blob (one file), shard=5GB, layer, tensor, or "
            "same. Several are compared: blob,layer",
            show_default="as the workload has them",
        ),
    ] = None,
    restore_as: Annotated[
        str,
        _axis_option(
            "--restore-as",
            help="Restore all (same), or only some tensors: subset=0.1 for a tenth of the bytes. "
            "Or what a rank of tensor parallelism loads: tp=8. Several are made of each save: "
            "same,subset=0.1",
        ),
    ] = "same",
    numjobs: Annotated[
        str,
        _axis_option(
            "--numjobs",
            help="Processes that save, and restore, at once, like the ranks of a node: each has "
            "files of its own, and the last one to end counts. Several are compared: 1,2,4",
        ),
    ] = "1",
    restore_mode: Annotated[
        str | None,
        _axis_option(
            "--restore-mode",
            help="How the ranks of a launcher, as replicas of the first one, restore its files: "
            "each reads them (all), one reads and passes on (broadcast), each reads a part "
            "(all-gather), or auto. Several are compared: all,broadcast",
            show_default="each rank has files of its own",
        ),
    ] = None,
    slices: Annotated[
        str | None,
        _axis_option(
            "--slices",
            help="Who writes a replicated checkpoint: off = rank 0 alone; all = every rank, or "
            "process of --numjobs, writes an equal slice; N = N ranks of each node. Several are "
            "compared: off,all,1",
            show_default="each rank has files of its own",
        ),
    ] = None,
    background: Annotated[
        str,
        _axis_option(
            "--background",
            help="What another process does at the same time: nothing (none), or restores of an "
            "earlier checkpoint (restore). Both are compared: none,restore",
        ),
    ] = "none",
    rank: Annotated[int, _axis_option("--rank", min=0, help="The rank to replay.")] = 0,
    rules: Annotated[
        str | None,
        _rule_option(
            "--rules",
            help="Keep MLPerf Storage's rules for checkpointing, as far as possible: mlperf.",
        ),
    ] = None,
    fio: Annotated[
        bool,
        _rule_option("--fio/--no-fio", help="Measure the best of four fio jobs in the same run."),
    ] = True,
    baseline: Annotated[
        str | None,
        _rule_option(
            "--baseline",
            help="The writer with which the others are compared, pair by pair: a name, with "
            "options and axes where they matter: 'odirect numjobs=1'.",
            show_default="peer:torch-save where it takes part; of several targets the first",
        ),
    ] = None,
    ceiling: Annotated[  # the name of --fio in the commands of older records
        bool, typer.Option("--ceiling/--no-ceiling", hidden=True)
    ] = True,
    output: Annotated[
        Path | None,
        _output_option(
            "-o", "--output", help="The result file.", show_default="results/<run>.jsonl"
        ),
    ] = None,
    format_: Annotated[
        ReportFormat, _output_option("--format", help="How to print the report.")
    ] = ReportFormat.TABLE,
    verbose: Annotated[bool, _output_option("-v", "--verbose", help=VERBOSE_HELP)] = False,
    report: Annotated[Path | None, _output_option("--report", help=REPORT_HELP)] = None,
    dry_run: Annotated[
        bool,
        _output_option(
            "--dry-run", help="Print the plan, bytes and expected time (by short probes)."
        ),
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Save and restore a checkpoint by each writer, and compare.

    Every save ends durable, every restore starts cold and is verified. The target is left as it
    was.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(launched(target[0].partition(",")[0] if target else None))
        sustained = duration is not None or until is not None
        _check_effects(
            ctx, repeat, format_, rules, sustained=sustained, dry_run=dry_run, ranks=ranks
        )
        with preparing("reading the workload and trying the writers", quiet=quiet):
            with collector_paused():  # the import of torch takes 0.15 s less
                from iobench.bench.axes import Axes
                from iobench.bench.judging.repeat import Repeat
                from iobench.bench.judging.rules import find_rules
                from iobench.bench.planning import expected_line, make_plan, plan_lines
                from iobench.bench.targets.choose import split_targets

            if output is not None:
                check_output(output)
            if report is not None:
                check_report(report)
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
                targets = (stack.enter_context(server(s3_local, ",".join(targets))),)
            kept = None if rules is None else find_rules(rules)
            name = the_workload(
                workload, workload_option, kept.default if kept else DEFAULT_WORKLOAD
            )
            with quiet_stdout():
                plan = make_plan(
                    workload=name,
                    writers=_default_writers(targets, kept) if writer is None else writer,
                    target=targets,
                    size=size,
                    repeat=Repeat.sustained(duration, until, max_bytes)
                    if sustained
                    else Repeat.parse(repeat, precision, max_time),
                    aa=aa,
                    rank=rank,
                    ceiling=fio and ceiling,
                    seed=seed,
                    baseline=baseline,
                    axes=axes,
                    rules=kept,
                    world=None if ranks is None else ranks.members.world,
                )
            _check_plan(plan, ctx)
            if output is None and not dry_run:
                check_output(output)
        if not quiet or dry_run:
            more = () if ranks is None else ranks.members.lines()
            print_plan((*plan_lines(plan), *_size_line(name, rank, size), *more))
        if dry_run:
            with preparing("probing the writers"):
                line = expected_line(plan)
            print_plan([line])
        else:
            _run(plan, output, format_, report, ranks, details=verbose, quiet=quiet)


def _default_writers(targets: tuple[str, ...], rules: Rules | None) -> str:
    if rules is not None:  # it measures one
        return _S3 if is_s3(targets[0]) else _USUAL
    return ",".join(dict.fromkeys(_S3 if is_s3(one) else _FILES for one in targets))


def _check_effects(
    ctx: typer.Context,
    repeat: str,
    format_: ReportFormat,
    rules: str | None,
    *,
    sustained: bool,
    dry_run: bool,
    ranks: Launched | None,
) -> None:
    """Raise UsageError for options that would have no effect."""
    if ranks is None:
        check_effect(ctx, ("restore_mode",), "only the ranks of a launcher restore together")
    else:
        why = f"{ranks.members.size} ranks take part, started by {ranks.members.launcher}"
        check_effect(ctx, ("numjobs", "rank", "s3_local", "background"), why)
    fio = ("fio",) if ctx.params["fio"] else ()
    if rules is not None:
        check_effect(ctx, (*_RULED, *fio), f"--rules {rules} sets it")
    if sustained:
        why = "--duration and --until repeat saves for a time, without fio"
        check_effect(ctx, ("repeat", "precision", "max_time", *fio), why)
    else:
        check_effect(ctx, ("max_bytes",), "only --duration and --until have it")
    if repeat != "auto":
        check_effect(ctx, ("precision", "max_time"), "only --repeat auto has these")
    if format_ is not ReportFormat.TABLE:
        check_effect(ctx, ("verbose",), f"--format {format_} has all details")
    if dry_run:
        check_effect(ctx, ("format_", "verbose", "report"), "--dry-run makes no report")


def _check_plan(plan: Plan, ctx: typer.Context) -> None:
    """Raise UsageError for options that would have no effect in this plan."""
    if len(plan.variants) == 1:
        check_effect(ctx, ("baseline",), "there is nothing else to compare it with")


def _size_line(name: str, rank: int, size: str | None) -> Iterator[str]:
    """Yield a line with the nearest sizes if the workload cannot be scaled close to `size`."""
    from iobench.verification.imported import load_workload

    if size not in (None, "full"):
        line = nearest_sizes_line(load_workload(name), rank, parse_size(size, "--size"))
        yield from [line] if line else []


def _run(
    plan: Plan,
    output: Path | None,
    format_: ReportFormat,
    page: Path | None,
    ranks: Launched | None,
    *,
    details: bool,
    quiet: bool,
) -> None:
    from iobench.results import default_path

    path = output or default_path(plan.workload.name)
    try:
        result = measure(plan, path, ranks, quiet=quiet)
    except BaseException:
        # Interrupted, or the disk is full: the samples recorded so far are still useful.
        recorded = read_stopped(path)
        if recorded is not None and recorded.samples:
            _show(recorded, format_, details=details)
            report_stopped(path, page)
        raise
    document = _show(result, format_, details=details)
    if page is not None:
        write_report(document, page)
    raise_failures(result)


def _show(result: ResultFile, format_: ReportFormat, *, details: bool) -> Document:
    from iobench.report.run import run_document

    document = run_document([result])
    render(document, format_, sys.stdout, details=details)
    print(f"record: {result.path}", file=sys.stderr)
    return document


def measure(
    plan: Plan, output: Path | None, ranks: Launched | None = None, *, quiet: bool = False
) -> ResultFile:
    """Run `plan` with progress on stderr and return its record, by default under results/."""
    from iobench.bench.runner import Runner
    from iobench.cli.progress import StderrProgress
    from iobench.results import ResultWriter, default_path, read

    path = output or default_path(plan.workload.name)
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


_CLOSE = 0.9  # of the requested size
_EXACT = 0.03


def nearest_sizes_line(full: Workload, rank: int, asked_bytes: int) -> str | None:
    """Return a line with the nearest sizes around `asked_bytes`; None if the smaller is close."""
    below = full.scaled(asked_bytes, rank).size_bytes(rank)
    if below >= _CLOSE * asked_bytes or below == full.size_bytes(rank):
        return None
    above = format_size(_above(full, rank, asked_bytes))
    return (
        f"size      {format_size(asked_bytes)} was asked for; the nearest sizes are "
        f"{format_size(below)} and {above}"
    )


def _above(full: Workload, rank: int, asked_bytes: int) -> int:
    """Return the smallest size above `asked_bytes`, by bisection: `scaled` never exceeds a size."""
    low, high, largest = asked_bytes, 2 * asked_bytes, full.size_bytes(rank)
    while (found := full.scaled(high, rank).size_bytes(rank)) <= asked_bytes and found < largest:
        low, high = high, 2 * high
    while high - low > _EXACT * asked_bytes:
        middle = (low + high) // 2
        if full.scaled(middle, rank).size_bytes(rank) > asked_bytes:
            high = middle
        else:
            low = middle
    return full.scaled(high, rank).size_bytes(rank)
