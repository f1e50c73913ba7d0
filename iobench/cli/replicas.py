"""`iobench replicas`: what jobs keep in the memory of this node."""

from __future__ import annotations

import sys
from typing import Any

import typer

from iobench.cli.given import FormatOption
from iobench.errors import UsageError
from iobench.report.render import render
from iobench.units import count_of, format_size

app = typer.Typer(
    no_args_is_help=True,
    help="Show or remove replicas of checkpoints in the node's memory.",
)


@app.command("status")
def status(format_: FormatOption = "table") -> None:
    """List jobs of this user with replicas on this node, and steps."""
    from iobench.replicas.directory import replica_directories
    from iobench.report.document import Document
    from iobench.report.grid import MISSING, Column, Grid

    found: list[dict[str, Any]] = [
        {
            "key": one.path.name,
            "location": str(one.facts().get("location", "")),
            "taken_bytes": one.taken_bytes(),
            "steps": sorted({version.step for version, _, _ in one.listed()}),
        }
        for one in replica_directories()
    ]
    columns: tuple[Column[dict[str, Any]], ...] = (
        Column("job", lambda one: one["key"], figure=False),
        Column("memory", lambda one: format_size(one["taken_bytes"])),
        Column("steps", lambda one: ", ".join(map(str, one["steps"])) or MISSING, figure=False),
        Column("location", lambda one: one["location"], figure=False),
    )
    document = Document(
        kind="iobench replicas",
        title=f"{count_of(len(found), 'job')} with replicas on this node",
        tables=(Grid.of(found, columns),) if found else (),
        data={"schema": "iobench.replicas/1", "jobs": found},
    )
    render(document, format_, sys.stdout)


@app.command("clean")
def clean(key: str = "") -> None:
    """Remove the replicas of jobs that do not run, which frees memory. Storage is not touched.

    Arguments:
        KEY: Of the job, as `status` prints it. [all]
    """
    from iobench.replicas.directory import replica_directories

    known = replica_directories()
    chosen = [one for one in known if not key or one.path.name == key]
    if key and not chosen:
        listed = ", ".join(one.path.name for one in known) or "none"
        raise UsageError(f"no job {key!r} on this node. Known: {listed}.")
    removed = 0
    for one in chosen:
        if one.remove_unless_used():
            print(f"removed {one.path.name}")
            removed += 1
        else:
            print(f"{one.path.name} is used by a job that runs", file=sys.stderr)
    print(f"replicas of {count_of(removed, 'job')} removed", file=sys.stderr)
