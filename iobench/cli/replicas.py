"""`iobench replicas`: what jobs keep in the memory of this node."""

from __future__ import annotations

import sys
from typing import Any

import typer

from iobench.cli.given import FormatOption
from iobench.errors import UsageError
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import count_of, format_size

app = typer.Typer(
    no_args_is_help=True,
    help="Show or remove replicas of checkpoints in the node's memory.",
)


@app.command("status")
def status(format_: FormatOption = "table") -> None:
    """List jobs of this user with replicas on this node, and steps."""
    from iobench.replicas.directory import replica_directories

    found: list[dict[str, Any]] = [
        {
            "key": one.path.name,
            "location": str(one.facts().get("location", "")),
            "taken_bytes": one.taken_bytes(),
            "steps": sorted({version.step for version, _, _ in one.listed()}),
        }
        for one in replica_directories()
    ]
    if format_ == "json":
        write_json({"schema": "iobench.replicas/1", "jobs": found}, sys.stdout)
        return
    for job in found:
        print(f"{job['key']}  {printable(job['location'])}")
        print(f"  memory   {format_size(job['taken_bytes'])}")
        print(f"  steps    {', '.join(map(str, job['steps'])) or 'none'}")
    print(f"{count_of(len(found), 'job')} with replicas on this node", file=sys.stderr)


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
