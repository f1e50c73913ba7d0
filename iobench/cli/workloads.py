"""`iobench workloads`: list the workloads, and show their files and tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import FormatOption, ListingFormat, preparing
from iobench.report.render import write_json
from iobench.units import format_size

if TYPE_CHECKING:
    from iobench.workloads import FileSpec, Workload

__all__ = ["app"]

app = typer.Typer(help="List the workloads, or show what one consists of.", no_args_is_help=True)


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
    workload: Annotated[str, typer.Argument(help="A named workload, or the path of a YAML file.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank whose files are shown.")] = 0,
    files: Annotated[bool, typer.Option("--files", help="List the files of the rank.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    format_: FormatOption = ListingFormat.TABLE,
) -> None:
    """Show the model, layout, sizes and step time of a workload."""
    from iobench import workloads

    loaded = workloads.load(workload)
    specs = loaded.files(rank)
    facts = _facts(loaded, rank)
    if format_ is ListingFormat.JSON:
        listed = [_file(spec, tensors=tensors) for spec in specs] if files or tensors else None
        write_json({"schema": "iobench.workload/1", **facts, "files": listed}, sys.stdout)
        return
    _print_facts(facts, len(specs))
    if files or tensors:
        _print_files(specs, tensors=tensors)


def _facts(workload: Workload, rank: int = 0) -> dict[str, Any]:
    step = workload.step_time
    parameters, total_bytes = workload.parameters, workload.total_size_bytes()
    return {
        "name": workload.name,
        "description": workload.description,
        "model": workload.model.name,
        "family": workload.model.family.id,
        "layout": workload.layout.id,
        "parameters": parameters,
        "world_size": workload.world_size,
        "rank": rank,
        "rank_bytes": workload.size_bytes(rank),
        "total_bytes": total_bytes,
        "bytes_per_parameter": total_bytes / parameters,
        "step_time": None
        if step is None
        else {
            "seconds": step.seconds,
            "gpus": step.gpus,
            "hardware": step.hardware,
            "precision": step.precision,
            "source": step.source,
        },
        "source": workload.source or workload.model.source,
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
    rows = {
        "workload": f"{facts['name']}: {facts['description']}",
        "model": f"{facts['model']} ({facts['family']}), {facts['parameters']:,} parameters",
        "layout": f"{facts['layout']}, {facts['world_size']} ranks",
        "rank": f"{facts['rank']}: {files} files, {_both(facts['rank_bytes'])}",
        "checkpoint": f"{_both(facts['total_bytes'])} over all ranks, "
        f"{facts['bytes_per_parameter']:.2f} bytes per parameter",
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
