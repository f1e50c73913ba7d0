"""`iobench run`: replay a workload's checkpoint through writers and report honest numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.seeds import LARGEST_SEED
from iobench.cli.servers import HERE, quiet_stdout, server
from iobench.errors import ContenderError, DataMismatchError
from iobench.report.render import ReportFormat
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.bench.plan import Plan
    from iobench.results import ResultFile

_FILES, _S3 = "buffered,uncached,odirect", "s3"


def run(
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", help="A named workload (iobench workloads list) or YAML."),
    ],
    writer: Annotated[
        str | None,
        typer.Option(
            "--writer",
            show_default="buffered,uncached,odirect; s3 in a bucket",
            help="Writers and peers, separated by commas, or all; NAME=VALUE sets an option of the "
            "one before it: odirect,block_size=8MiB,odirect,threads=4,peer:torch-save",
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target", help="The directory to measure, or s3://bucket/prefix.", show_default="here"
        ),
    ] = HERE,
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
        typer.Option(
            "--repeat", help="Samples of each writer, or auto: until --precision or --max-time."
        ),
    ] = "6",
    precision: Annotated[
        str, typer.Option("--precision", help="With auto: how wide an interval may be.")
    ] = "5%",
    max_time: Annotated[
        str, typer.Option("--max-time", help="With auto: no repetition begins after it.")
    ] = "10min",
    aa: Annotated[
        bool,
        typer.Option(
            "--aa", help="Measure the first writer twice: the noise floor of the machine."
        ),
    ] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose files to replay.")] = 0,
    pool: Annotated[
        str, typer.Option("--pool", help="Memory that stands in for all tensors.")
    ] = "1GiB",
    ceiling: Annotated[
        bool, typer.Option("--ceiling/--no-ceiling", help="Measure fio beside the writers.")
    ] = True,
    crc: Annotated[
        bool, typer.Option("--crc/--no-crc", help="CRC32 in torch zip files, as stock torch.save.")
    ] = True,
    serializer: Annotated[
        str | None,
        typer.Option(
            "--serializer",
            help="Write every file as safetensors, torch, dcp or raw (peers have their own), or "
            "same: as the workload has it. Several, separated by commas, are compared.",
            show_default="as the workload has them",
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            "--granularity",
            help="Deal the tensors to files anew: blob (one file), shard=5GB, layer, tensor, or "
            "same. Several are compared: blob,layer",
            show_default="as the workload has them",
        ),
    ] = None,
    restore_as: Annotated[
        str,
        typer.Option(
            "--restore-as",
            help="Restore all (same), or only some tensors: subset=0.1 for a tenth of the bytes. "
            "Several are made of each save: same,subset=0.1",
        ),
    ] = "same",
    numjobs: Annotated[
        str,
        typer.Option(
            "--numjobs",
            help="Processes that save, and restore, at once, as the ranks of a node do: each has "
            "files of its own, and the last one's end counts. Several are compared: 1,2,4",
        ),
    ] = "1",
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            help="Whose rates the others' are compared with, pair by pair: a name, with options "
            "and axes where they matter: 'odirect numjobs=1'.",
            show_default="peer:torch-save where it takes part",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=LARGEST_SEED,
            help="Of data and order.",
            show_default="random",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The result file.", show_default="results/<run>.jsonl"),
    ] = None,
    format_: Annotated[
        ReportFormat, typer.Option("--format", help="How to print the report.")
    ] = ReportFormat.TABLE,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan, bytes and expected time (by short probes)."
        ),
    ] = False,
) -> None:
    """Save and restore a model's checkpoint by each writer, and compare.

    Every save ends durable, every restore starts cold and is verified. The target is left as it
    was.
    """
    from iobench.bench.axes import Axes
    from iobench.bench.judging.repeat import Repeat
    from iobench.bench.planning import expected_line, make_plan, plan_lines
    from iobench.results import check_new

    if output is not None:
        check_new(output)
    axes = Axes.parse(
        serializer=serializer, granularity=granularity, restore_as=restore_as, numjobs=numjobs
    )
    with server(s3_local, target) as place:
        with quiet_stdout():
            plan = make_plan(
                workload=workload,
                writers=(_S3 if is_s3(place) else _FILES) if writer is None else writer,
                target=place,
                size=size,
                repeat=Repeat.parse(repeat, precision, max_time),
                aa=aa,
                rank=rank,
                pool=pool,
                ceiling=ceiling,
                crc=crc,
                seed=seed,
                baseline=baseline,
                axes=axes,
            )
        for line in plan_lines(plan):
            print(line, file=sys.stderr)
        if dry_run:
            print(expected_line(plan), file=sys.stderr)
        else:
            _run(plan, output, format_)


def _run(plan: Plan, output: Path | None, format_: ReportFormat) -> None:
    from iobench.report.render import render
    from iobench.report.summary import summarise

    result = measure(plan, output)
    render(summarise(result), format_, sys.stdout)
    print(f"record: {result.path}", file=sys.stderr)
    raise_failures(result)


def measure(plan: Plan, output: Path | None) -> ResultFile:
    """Run `plan` with progress on stderr; its record, by default under results/."""
    from iobench.bench.runner import Runner
    from iobench.cli.progress import StderrProgress
    from iobench.results import ResultWriter, default_path, read

    path = output or default_path(plan.workload.name)
    with quiet_stdout(), StderrProgress() as progress, ResultWriter(path) as results:
        Runner(plan=plan, results=results, progress=progress).run()
    return read(path)


def raise_failures(result: ResultFile) -> None:
    """Raise ContenderError for contenders that failed, DataMismatchError for data that differ."""
    if result.failures:
        who = ", ".join(f"{one.setting.name} ({one.error})" for one in result.failures)
        raise ContenderError(f"failed and left out: {who}")
    wrong = sum(sample.verified.mismatches for sample in result.samples if sample.verified)
    if wrong:
        raise DataMismatchError(f"{wrong} tensors came back other than they were saved")
