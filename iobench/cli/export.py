"""`iobench export`: a stored checkpoint in the format of other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from iobench.cli.progress import VerifyProgress
from iobench.ranks.world import World
from iobench.text import printable
from iobench.units import count_of, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.exports.export import ExportReport


def export(
    checkpoint: str,
    *,
    output: str,
    format_: Literal["safetensors", "torch", "dcp"] = "safetensors",
    key: str = "",
    strip_prefix: str = "",
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    memory: str = "1GiB",
    writer: str | None = None,
    replace: bool = False,
    verify: bool = True,
) -> None:
    """Write a checkpoint for other programs: Hugging Face, torch, DCP.

    Memory is bounded, whatever its size. The output appears whole or not at all. Under torchrun,
    all ranks write.

    Arguments:
        CHECKPOINT: A checkpoint of any format, or a run, of which the newest step is taken;
            s3://bucket/prefix too.

    Options:
        -o, --output DIR: The new directory; with --format torch, the file.
        --format: safetensors for Hugging Face, torch (one file), or dcp.
        --key NAME: Only this part of the state: model.
        --strip-prefix PREFIX: Remove it from names: module., _orig_mod.
        --dtype DTYPE: Convert floats to bf16, fp16 or fp32.
        --max-shard-size SIZE: The most bytes in a file.
        --memory SIZE: Memory for tensors on their way.
        --writer WRITERS: Reads and writes: a writer or writer.toml. [hybrid; s3 to read a bucket]
        --replace: Replace an older export; config.json and the like stay.
        --verify/--no-verify: Read the new files again, and compare.
    """
    from iobench.exports.export import export as write

    leads = World.detect().rank == 0
    with VerifyProgress(output, quiet=not leads) as progress:
        report = write(
            checkpoint,
            output,
            format=format_,
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
    if leads:
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
