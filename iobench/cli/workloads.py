"""`iobench workloads`: list the workloads, show their files, and import a checkpoint as one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import FormatOption, ListingFormat, check_output, preparing
from iobench.report.render import write_json
from iobench.units import format_size

if TYPE_CHECKING:
    from iobench.workloads import FileSpec, Workload

__all__ = ["app"]

app = typer.Typer(
    help="List and show workloads, or import a checkpoint as one.",
    no_args_is_help=True,
)


@app.command("list")
def list_(format_: FormatOption = ListingFormat.TABLE) -> None:
    """List the named workloads."""
    from iobench import workloads

    with preparing("computing the sizes"):
        found = [_facts(workloads.load(name)) for name in workloads.names()]
    if format_ is ListingFormat.JSON:
        write_json({"schema": "iobench.workloads/1", "workloads": found}, sys.stdout)
        return
    columns = (
        *(("workload", False), ("parameters", True), ("ranks", True), ("rank 0", True)),
        *(("checkpoint", True), ("B/param", True), ("layout", False)),
    )
    rows = [
        [
            facts["name"],
            f"{facts['parameters'] / 1e9:.2f} B",
            str(facts["world_size"]),
            format_size(facts["rank_bytes"]),
            format_size(facts["total_bytes"]),
            f"{facts['bytes_per_parameter']:.2f}",
            facts["layout"],
        ]
        for facts in found
    ]
    _print_table(columns, rows, drop=(5, 4, 2))  # B/param, checkpoint, ranks


@app.command()
def show(
    workload: Annotated[
        str, typer.Argument(help="A named workload, or the path of a YAML file or a checkpoint.")
    ],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank whose files are shown.")] = 0,
    files: Annotated[bool, typer.Option("--files", help="List the files of the rank.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    format_: FormatOption = ListingFormat.TABLE,
) -> None:
    """Show the model, layout, sizes and step time of a workload."""
    from iobench.verification.imported import load_workload

    loaded = load_workload(workload)
    specs = loaded.files(rank)
    facts = _facts(loaded, rank)
    if format_ is ListingFormat.JSON:
        listed = [_file(spec, tensors=tensors) for spec in specs] if files or tensors else None
        write_json({"schema": "iobench.workload/1", **facts, "files": listed}, sys.stdout)
        return
    _print_facts(facts, len(specs))
    if files or tensors:
        _print_files(specs, tensors=tensors)


@app.command("import")
def import_(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, file or s3://bucket/prefix that verify understands.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The workload file.", show_default="shown")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Write neutral names of files and tensors.")
    ] = False,
) -> None:
    """Write the files and tensors of a checkpoint down as a workload.

    Only headers are read: no values of tensors. All sizes stay, also of anonymous headers.
    """
    from iobench.verification.imported import document_of
    from iobench.workloads.schema import write_yaml

    if output is not None:
        check_output(output)
    text = write_yaml(document_of(checkpoint, anonymous=anonymous))
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"wrote     {output}", file=sys.stderr)


def _facts(workload: Workload, rank: int = 0) -> dict[str, Any]:
    from iobench.workloads.workload import ModelWorkload

    step, total_bytes = workload.step_time, workload.total_size_bytes()
    made = workload if isinstance(workload, ModelWorkload) else None  # else the files are listed
    return {
        "name": workload.name,
        "description": workload.description,
        "model": made and made.model.name,
        "family": made and made.model.family.id,
        "layout": made.layout.id if made else "files",
        "parameters": made and made.parameters,
        "world_size": workload.world_size,
        "rank": rank,
        "rank_bytes": workload.size_bytes(rank),
        "total_bytes": total_bytes,
        "bytes_per_parameter": made and made.bytes_per_parameter,
        "step_time": None
        if step is None
        else {
            "seconds": step.seconds,
            "gpus": step.gpus,
            "hardware": step.hardware,
            "precision": step.precision,
            "source": step.source,
        },
        "source": workload.source or (made.model.source if made else ""),
    }


def _file(spec: FileSpec, *, tensors: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "path": spec.path,
        "format": spec.format,
        "bytes": spec.size_bytes,
        "exact": spec.exact,
        "tensor_count": len(spec.tensors),
    }
    if tensors:
        described["tensors"] = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.size_bytes}
            for t in spec.tensors
        ]
    return described


def _print_facts(facts: dict[str, Any], files: int) -> None:
    from iobench.report.grid import console_for, print_wrapped

    console = console_for(sys.stdout)
    step = facts["step_time"]
    model, each = "unknown: its files are listed", ""
    if facts["model"]:
        model = f"{facts['model']} ({facts['family']}), {facts['parameters']:,} parameters"
        each = f", {facts['bytes_per_parameter']:.2f} bytes per parameter"
    rows = {
        "workload": f"{facts['name']}: {facts['description']}",
        "model": model,
        "layout": f"{facts['layout']}, {facts['world_size']} ranks",
        "rank": f"{facts['rank']}: {files} files, {_both(facts['rank_bytes'])}",
        "checkpoint": f"{_both(facts['total_bytes'])} over all ranks{each}",
        "step time": "unknown"
        if step is None
        else f"{step['seconds']:g} s on {step['gpus']} {step['hardware']}, {step['precision']} "
        f"({step['source']})",
        "source": facts["source"],
    }
    for name, value in rows.items():
        print_wrapped(console, f"{name:11}{value}", indent=" " * 11)


def _print_files(specs: tuple[FileSpec, ...], *, tensors: bool) -> None:
    columns = (
        *(("file", False), ("format", False), ("bytes", True), ("size", True)),
        ("tensors", True),
    )
    rows = []
    for spec in specs:
        size = f"{spec.size_bytes:,}" if spec.exact else f"about {spec.size_bytes:,}"
        human = format_size(spec.size_bytes)
        rows.append([spec.path, spec.format, size, human, str(len(spec.tensors))])
        if tensors and spec.format != "raw":
            rows += [
                [f"  {one.name}", f"{one.dtype} {list(one.shape)}", f"{one.size_bytes:,}", "", ""]
                for one in spec.tensors
            ]
    print()
    _print_table(columns, rows, drop=(3, 4, 1))  # size, tensors, format


def _both(size_bytes: int) -> str:
    return f"{format_size(size_bytes)} ({size_bytes / 1e9:,.2f} GB)"


def _print_table(
    columns: tuple[tuple[str, bool], ...], rows: list[list[str]], drop: tuple[int, ...]
) -> None:
    from iobench.report.grid import Grid, console_for, print_grid

    print_grid(console_for(sys.stdout), Grid(columns=columns, rows=rows, drop=drop))
