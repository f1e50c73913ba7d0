"""`iobench offload`: optimizer state on storage: what is there, and stock files of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from iobench.cli.given import FormatOption, ListingFormat
from iobench.errors import UsageError
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import count_of, format_rate, format_size

if TYPE_CHECKING:
    from iobench.offload.inspect import FoundGeneration, FoundState

app = typer.Typer(
    no_args_is_help=True,
    help="Show optimizer state on storage, or export it to stock files.",
)

_DirectoryArgument = Annotated[Path, typer.Argument(help="The directory of the optimizer's state.")]


@app.command("show")
def show(directory: _DirectoryArgument, format_: FormatOption = ListingFormat.TABLE) -> None:
    """List the generations in a state directory. A trainer may be at work there."""
    from iobench.offload.inspect import inspect

    found = inspect(directory)
    if format_ is ListingFormat.JSON:
        write_json(_as_json(found), sys.stdout)
        return
    layout = found.layout
    elements = sum(one.elements for one in layout.parameters)
    print(
        f"{count_of(len(layout.parameters), 'parameter')}, {elements:,} elements in "
        f"{count_of(layout.chunks, 'chunk')}; {format_size(found.reserved_bytes)} reserved for "
        f"{layout.slots} generations"
    )
    print(
        f"{'generation':>10}  {'steps':>8}  {'pinned as':>9}  {'committed':<19}  "
        f"{'written':>10}  {'rate':<26}  health"
    )
    for one in found.generations:
        committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time_s))
        pinned = "-" if one.step is None else str(one.step)
        print(
            f"{one.generation:>10}  {one.updates:>8}  {pinned:>9}  {committed:<19}  "
            f"{format_size(one.written_bytes):>10}  {format_rate(one.rate_bytes_per_s):<26}  "
            f"{_health(one)}"
        )
    print(f"{count_of(len(found.generations), 'generation')} in {directory}", file=sys.stderr)


def _health(one: FoundGeneration) -> str:
    if one.damaged:
        return "damaged"
    return "kept" if one.kept else "may be overwritten"


def _as_json(found: FoundState) -> dict[str, object]:
    layout = found.layout
    return {
        "schema": "iobench.offload/1",
        "parameters": len(layout.parameters),
        "elements": sum(one.elements for one in layout.parameters),
        "chunks": layout.chunks,
        "pins": layout.pins,
        "reserved_bytes": found.reserved_bytes,
        "generations": [
            {
                "generation": one.generation,
                "steps": one.updates,
                "pinned_as": one.step,
                "health": _health(one),
                "time_s": one.time_s,
                "written_bytes": one.written_bytes,
                "elapsed_s": one.elapsed_s,
            }
            for one in found.generations
        ],
    }


@app.command("export")
def export(
    directory: _DirectoryArgument,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="FILE.safetensors: the parameters. FILE.pt: the optimizer's state_dict.",
        ),
    ],
    step: Annotated[
        str, typer.Option("--step", help="The step of a pin, pinned (the newest one), or latest.")
    ] = "latest",
) -> None:
    """Write one generation to a file of a stock format, verified. Needs memory for all of it."""
    from iobench.offload.stock import export as write

    updates = write(directory, _wanted(step), output)
    print(f"{printable(str(output))}: the state after {count_of(updates, 'step')}", file=sys.stderr)


def _wanted(step: str) -> int | Literal["latest", "pinned"]:
    if step == "latest":
        return "latest"
    if step == "pinned":
        return "pinned"
    try:
        return int(step)
    except ValueError:
        raise UsageError(f"--step {step}: a number, pinned or latest") from None
