"""`iobench workloads`: list the workloads, show their files, and import a checkpoint as one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from iobench.cli.given import FormatOption, check_output, preparing
from iobench.report.render import render
from iobench.units import format_size

if TYPE_CHECKING:
    from iobench.report.grid import Grid
    from iobench.workloads import FileSpec, Workload

app = typer.Typer(
    help="List and show workloads, or import a checkpoint as one.", no_args_is_help=True
)


@app.command("list")
def list_() -> None:
    """List the named workloads."""
    from iobench import workloads

    with preparing("computing the sizes"):
        found = [_facts(workloads.load(name)) for name in workloads.names()]
    from iobench.report.grid import Column, Grid

    columns: tuple[Column[dict[str, Any]], ...] = (
        Column("workload", lambda one: one["name"], figure=False),
        Column("parameters", lambda one: f"{one['parameters'] / 1e9:.2f} B"),
        Column("ranks", lambda one: str(one["world_size"]), 3),
        Column("rank 0", lambda one: format_size(one["rank_bytes"])),
        Column("checkpoint", lambda one: format_size(one["total_bytes"]), 2),
        Column("B/param", lambda one: f"{one['bytes_per_parameter']:.2f}", 1),
        Column("layout", lambda one: one["layout"], figure=False),
    )
    _show("named workloads", [Grid.of(found, columns)])


@app.command()
def show(
    workload: str,
    rank: int = 0,
    files: bool = False,
    format_: FormatOption = "table",
) -> None:
    """Show the model, layout, sizes and step time of a workload.

    Arguments:
        WORKLOAD: A named workload, or the path of a YAML file or a checkpoint.

    Options:
        --rank N: The rank whose files are shown.
        --files: List the files of the rank. --format json has their tensors too.
    """
    from iobench.verification.imported import load_workload

    loaded = load_workload(workload)
    specs = loaded.files(rank)
    facts, grids = _facts(loaded, rank), []
    if files:
        grids.append(_files_grid(specs))
    listed = [_file(spec) for spec in specs] if files else None
    data = {"schema": "iobench.workload/1", **facts, "files": listed}
    title = f"{facts['name']}: {facts['description']}"
    _show(title, [_facts_grid(facts, len(specs)), *grids], data, format_)


def _show(
    title: str,
    grids: Sequence[Grid],
    data: Mapping[str, Any] | None = None,
    format_: str = "table",
) -> None:
    from iobench.report.document import Document

    document = Document(kind="iobench workloads", title=title, tables=tuple(grids), data=data or {})
    render(document, format_, sys.stdout)


@app.command("import")
def import_(checkpoint: str, output: Path | None = None, anonymous: bool = False) -> None:
    """Write the files and tensors of a checkpoint down as a workload.

    Only headers are read: no values of tensors. All sizes stay, also of anonymous headers.

    Arguments:
        CHECKPOINT: A directory, file or s3://bucket/prefix that verify understands.

    Options:
        -o, --output FILE: The workload file. [shown]
        --anonymous: Write neutral names of files and tensors.
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
        "step_time": step and asdict(step),
        "source": workload.source or (made.model.source if made else ""),
    }


def _file(spec: FileSpec) -> dict[str, Any]:
    return {
        "path": spec.path,
        "format": spec.format,
        "bytes": spec.size_bytes,
        "exact": spec.exact,
        "tensor_count": len(spec.tensors),
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.size_bytes}
            for t in spec.tensors
        ],
    }


def _facts_grid(facts: Mapping[str, Any], files: int) -> Grid:
    from iobench.report.grid import Grid, words

    step = facts["step_time"]
    model, each = "unknown: its files are listed", ""
    if facts["model"]:
        model = f"{facts['model']} ({facts['family']}), {facts['parameters']:,} parameters"
        each = f", {facts['bytes_per_parameter']:.2f} bytes per parameter"
    took = "unknown"
    if step:
        took = f"{step['seconds']:g} s on {step['gpus']} {step['hardware']}, {step['precision']}"
        took += f" ({step['source']})"
    rows = {
        "model": model,
        "layout": f"{facts['layout']}, {facts['world_size']} ranks",
        "rank": f"{facts['rank']}: {files} files, {_both(facts['rank_bytes'])}",
        "checkpoint": f"{_both(facts['total_bytes'])} over all ranks{each}",
        "step time": took,
        "source": facts["source"],
    }
    columns = words("fact", "value", sentence=True)
    return Grid(columns=columns, rows=[[*row] for row in rows.items()])


def _files_grid(specs: tuple[FileSpec, ...]) -> Grid:
    from iobench.report.grid import Column, Grid

    columns: tuple[Column[FileSpec], ...] = (
        Column("file", lambda one: one.path, figure=False),
        Column("format", lambda one: one.format, 3, figure=False),
        Column("bytes", lambda one: f"{'' if one.exact else 'about '}{one.size_bytes:,}"),
        Column("size", lambda one: format_size(one.size_bytes), 1),
        Column("tensors", lambda one: str(len(one.tensors)), 2),
    )
    return Grid.of(specs, columns)


def _both(size_bytes: int) -> str:
    return f"{format_size(size_bytes)} ({size_bytes / 1e9:,.2f} GB)"
