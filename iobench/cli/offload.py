"""`iobench offload`: optimizer state on storage: what is there, and stock files of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from iobench.errors import UsageError
from iobench.report.render import render
from iobench.text import printable
from iobench.units import count_of, format_size

if TYPE_CHECKING:
    from iobench.offload.store import FoundGeneration

app = typer.Typer(
    no_args_is_help=True, help="Show optimizer state on storage, or export it to stock files."
)


@app.command("show")
def show(directory: Path) -> None:
    """List the generations in a state directory. A trainer may be at work there.

    Arguments:
        DIRECTORY: The directory of the optimizer's state.
    """
    from iobench.offload.files import file_sizes
    from iobench.offload.store import inspect
    from iobench.report.document import Document
    from iobench.report.grid import MISSING, Column, Grid

    layout, generations = inspect(directory)
    reserved_bytes = sum(file_sizes(layout).values())
    elements = sum(one.elements for one in layout.parameters)
    columns: tuple[Column[FoundGeneration], ...] = (
        Column("generation", lambda one: str(one.record.generation)),
        Column("steps", lambda one: str(one.record.updates)),
        Column("pinned as", lambda one: MISSING if one.step is None else str(one.step)),
        Column("committed", _committed),
        Column("health", _health, figure=False),
    )
    document = Document(
        kind="iobench offload",
        title=f"{count_of(len(layout.parameters), 'parameter')}, {elements:,} elements in "
        f"{count_of(layout.chunks, 'chunk')}; {format_size(reserved_bytes)} reserved for "
        f"{layout.slots} generations",
        tables=(Grid.of(generations, columns),),
    )
    render(document, "table", sys.stdout)


def _committed(one: FoundGeneration) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.record.time_s))


def _health(one: FoundGeneration) -> str:
    if one.record.damaged:
        return "damaged"
    return "kept" if one.kept else "may be overwritten"


@app.command("export")
def export(directory: Path, *, output: Path, step: str = "latest") -> None:
    """Write one generation to a file of a stock format, verified. Needs memory for all of it.

    Arguments:
        DIRECTORY: The directory of the optimizer's state.

    Options:
        -o, --output FILE: FILE.safetensors: the parameters. FILE.pt: the optimizer's state_dict.
        --step WHEN: The step of a pin, pinned (the newest one), or latest.
    """
    from iobench.offload.convert import export as write

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
