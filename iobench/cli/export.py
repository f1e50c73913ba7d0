"""`iobench export`: a stored checkpoint in the format of other programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import QuietOption
from iobench.cli.progress import VerifyProgress
from iobench.ranks.world import World
from iobench.report.render import write_json
from iobench.text import printable, printable_values
from iobench.units import count_of, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.exports.export import ExportReport


class _Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint of any format, or a run, of which the newest step is taken; "
            "s3://bucket/prefix too."
        ),
    ],
    *,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The new directory; with --format torch, the file.",
        ),
    ],
    format_: Annotated[
        _Format,
        typer.Option("--format", help="safetensors for Hugging Face, torch (one file), or dcp."),
    ] = _Format.SAFETENSORS,
    key: Annotated[
        str, typer.Option("--key", metavar="NAME", help="Only this part of the state: model.")
    ] = "",
    strip_prefix: Annotated[
        str,
        typer.Option(
            "--strip-prefix", metavar="PREFIX", help="Remove it from names: module., _orig_mod."
        ),
    ] = "",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Convert floats to bf16, fp16 or fp32."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="The most bytes in a file.")
    ] = "5GB",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory for tensors on their way.")
    ] = "1GiB",
    writer: Annotated[
        str | None,
        typer.Option(
            "--writer",
            help="Reads and writes: a writer or writer.toml.",
            show_default="hybrid; s3 to read a bucket",
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace an older export; config.json and the like stay."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read the new files again, and compare.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Write a checkpoint for other programs: Hugging Face, torch, DCP.

    Memory is bounded, whatever its size. The output appears whole or not at all. Under torchrun,
    all ranks write.
    """
    from iobench.exports.export import export as write

    leads = World.detect().rank == 0
    with VerifyProgress(output, quiet=quiet or not leads) as progress:
        report = write(
            checkpoint,
            output,
            format=format_.value,
            key=key,
            strip_prefix=strip_prefix,
            dtype=dtype,
            max_shard_size=max_shard_size,
            memory=memory,
            writer=writer,
            replace=replace,
            verify=verify,
            progress=progress.read,
        )
    if not leads:
        return
    if json:
        found = {"schema": "iobench.export/1", **asdict(report)}
        write_json(dict(printable_values(found)), sys.stdout)
    else:
        _print(report)


def _print(report: ExportReport) -> None:
    rate = format_rate(report.size_bytes / max(report.write_s, 1e-9))
    print(
        f"{printable(report.out)}: {count_of(report.tensors, 'tensor')} in "
        f"{count_of(len(report.files), 'file')}, {format_size(report.size_bytes)} in "
        f"{format_seconds(report.write_s)}, {rate}"
    )
    print(f"  source   {printable(report.source)}")
    print(
        f"  checked  {format_size(report.proved_bytes)} of {format_size(report.source_bytes)} of "
        "the source had a checksum"
    )
    if report.verified_bytes:
        print(f"  verified all of it was read again in {format_seconds(report.verify_s)}")
    else:
        print("  verified nothing (--no-verify)")
    for tied, name in report.ties.items():
        print(f"  tied     {printable(tied)} is stored as {printable(name)}")
    if report.left_out:
        print(f"  left out {printable(', '.join(report.left_out))}: not tensors")
