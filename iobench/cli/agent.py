"""`iobench agent`: the memory agents on this node, which keep replicas of checkpoints."""

from __future__ import annotations

import sys
from typing import Any

import typer

from iobench.cli.given import FormatOption, ListingFormat
from iobench.errors import ReplicaError, UsageError
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import format_size

_ANSWER_S = 10.0

app = typer.Typer(
    no_args_is_help=True, help="Show or stop the agents that keep replicas in memory."
)


@app.command("status")
def status(format_: FormatOption = ListingFormat.TABLE) -> None:
    """List the agents of this user on this node, with their steps."""
    found = _statuses()
    if format_ is ListingFormat.JSON:
        write_json({"schema": "iobench.agents/1", "agents": found}, sys.stdout)
        return
    for one in found:
        print(f"{one['key']}  process {one['pid']}  {printable(one['location'])}")
        if "error" in one:
            print(f"  {printable(one['error'])}")
            continue
        steps = sorted({segment["version"][1] for segment in one["segments"]})
        listed = ", ".join(map(str, steps)) or "none"
        rate = one["rate_bytes_per_s"]
        print(f"  job      {printable(one['job'])}")
        print(f"  memory   {format_size(one['taken_bytes'])} in {len(one['segments'])} segments")
        print(f"  steps    {listed}")
        print(f"  ranks    {one['trainers']} connected")
        print(f"  address  {one['address'][0]}:{one['address'][1]}")
        print(f"  pace     {'no limit' if rate is None else format_size(rate) + '/s'}")
    print(f"{len(found)} memory agents on this node", file=sys.stderr)


@app.command("stop")
def stop(key: str = "") -> None:
    """Stop agents and free their memory. What they hold is lost; storage is not touched.

    Arguments:
        KEY: Of the agent, as `status` prints it. [all]
    """
    from iobench.replicas.runtime import agent_directories, stop_agent

    chosen = [one for one in agent_directories() if not key or one.path.name == key]
    if key and not chosen:
        known = ", ".join(one.path.name for one in agent_directories()) or "none"
        raise UsageError(f"no agent {key!r} on this node. Known: {known}.")
    stopped = 0
    for directory in chosen:
        if stop_agent(directory):
            print(f"stopped {directory.path.name}")
            stopped += 1
    print(f"{stopped} memory agents stopped", file=sys.stderr)


def _statuses() -> list[dict[str, Any]]:
    from msgspec.structs import asdict

    from iobench.replicas.protocol import AgentStatus, Facts, connect
    from iobench.replicas.runtime import agent_directories

    found: list[dict[str, Any]] = []
    for directory in agent_directories():
        record, token = directory.record(), directory.token()
        if record is None or token is None:
            continue
        facts: dict[str, Any] = {"pid": record.pid, "job": record.job, "location": record.location}
        try:
            with connect(directory.socket, token, timeout_s=_ANSWER_S) as agent:
                facts = asdict(agent.ask(Facts, AgentStatus()))
                facts["trainers"] -= 1  # this connection
        except ReplicaError as error:
            facts["error"] = str(error)
        found.append({"key": directory.path.name, **facts})
    return found
