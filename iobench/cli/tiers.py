"""`iobench tiers`: where the copies of a run's checkpoints are."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import FormatOption, ListingFormat
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import count_of, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.remote.memory_status import MemoryStatus
    from iobench.remote.rates import Estimate
    from iobench.remote.status import TiersStatus


def tiers(
    directory: Annotated[
        Path, typer.Argument(help="The directory of a Checkpointer with tiers=[...].")
    ],
    format_: FormatOption = ListingFormat.TABLE,
) -> None:
    """Show in which tiers the checkpoints of a run are.

    It reads the directory, its journal, and the memory status of a process that runs. The
    remote tier is not asked.
    """
    from iobench.remote.journal import JOURNAL, DrainJournal
    from iobench.remote.memory_status import memory_status
    from iobench.remote.status import tiers_status

    memory = memory_status(directory)
    found = None
    if memory is None or any(one.event == "remote" for one in DrainJournal(directory).events()):
        found = tiers_status(directory)
    if found is not None and found.damaged_lines:
        lines = count_of(found.damaged_lines, "damaged line")
        print(f"{printable(str(directory / JOURNAL))}: {lines} left out", file=sys.stderr)
    if format_ is ListingFormat.JSON:
        document = {"schema": "iobench.remote/2"} if found is None else _document(found)
        write_json({**document, "memory": _memory_document(memory)}, sys.stdout)
        return
    if memory is not None:
        _print_memory(memory)
    if found is not None:
        if memory is not None:
            print()
        _print_status(found)


def _print_memory(found: MemoryStatus) -> None:
    """Print the memory tiers of a run."""
    now_s = time.time()
    ranks = f", rank 0 of {found.ranks}: its share of the memory" if found.ranks > 1 else ""
    print(f"memory  of process {found.pid}{ranks}")
    for one in found.tiers:
        rate = "" if one.rate_bytes_per_s is None else f", {format_rate(one.rate_bytes_per_s)}"
        used = f"{format_size(one.used_bytes)} of {format_size(one.size_bytes)} used"
        print(f"  {printable(one.tier)}: {used}{rate}")
    lag_s = found.lag_s(now_s)
    print(f"  lag   {format_seconds(lag_s) if lag_s else 'none'}")
    for held in found.snapshots:
        state = "written" if held.written else "volatile"
        age = format_seconds(max(0.0, now_s - held.created_s))
        size = format_size(held.size_bytes)
        print(f"{held.step:>10}  {size:>10}  {age:>12}  {state:<8}  {printable(held.tiers)}")


def _memory_document(found: MemoryStatus | None) -> dict[str, Any] | None:
    """Return the part of the JSON document about memory; None: no process has any."""
    return None if found is None else {**asdict(found), "lag_s": found.lag_s(time.time())}


def _print_status(found: TiersStatus) -> None:
    print(f"local   {printable(found.directory)}")
    print(f"  fill  {format_size(found.size_bytes)}, {format_size(found.free_bytes)} free")
    print(f"  rate  {_rate(found.local_rate)}")
    print(f"remote  {printable(found.remote)}")
    print(f"  rate  {_rate(found.remote_rate)}")
    print(f"  lag   {format_seconds(found.lag_s) if found.lag_s else 'none'}")
    print(f"        {printable(found.past_lag)}; {_past_lag(found)}")
    if found.failure:
        print(f"  last attempt failed: {printable(found.failure)}")
    print(f"if the local tier is lost now: {_lost(found)}")
    print()
    print(f"{'step':>10}  {'size':>10}  {'age':>12}  local    remote")
    for one in found.checkpoints:
        size = "" if one.size_bytes is None else format_size(one.size_bytes + one.optimizer_bytes)
        local = "damaged" if one.serial is None else "durable"
        age = format_seconds(one.age_s)
        print(f"{one.step:>10}  {size:>10}  {age:>12}  {local:<7}  {one.remote}")
    if any(one.optimizer_bytes for one in found.checkpoints):
        print("sizes include the optimizer state, which is in the directory of the optimizer")
    if found.decisions:
        print("\nplacement of the last saves")
    for placed in found.decisions:
        print(f"{placed.step:>10}  {placed.tier:<6}  {printable(placed.why)}")


def _lost(found: TiersStatus) -> str:
    if found.local_step is None:
        return "nothing, it has no checkpoint"
    if found.steps_at_risk is None:
        return f"all {count_of(found.local_step, 'step')}, the remote tier has no checkpoint"
    after = f"and what was trained after step {found.local_step}"
    if not found.steps_at_risk:
        return f"what was trained after step {found.remote_step}"
    at_risk = count_of(found.steps_at_risk, "step")
    return f"{at_risk}, from {found.remote_step} to {found.local_step}, {after}"


def _past_lag(found: TiersStatus) -> str:
    copies = f"{found.superseded} copies superseded"
    if not found.waits:
        return copies
    waited = format_seconds(found.waited_s)
    return f"{copies}, {count_of(found.waits, 'save')} waited {waited}"


def _rate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "not measured yet"
    return (
        f"{format_rate(1 / estimate.s_per_byte)}, {format_rate(1 / estimate.high)} to "
        f"{format_rate(1 / estimate.low)}"
    )


def _document(found: TiersStatus) -> dict[str, Any]:
    def rate(estimate: Estimate | None) -> dict[str, Any] | None:
        return (
            None
            if estimate is None
            else {
                "rate_bytes_per_s": 1 / estimate.s_per_byte,
                "ci95_bytes_per_s": [1 / estimate.high, 1 / estimate.low],
                "samples": estimate.count,
            }
        )

    return {
        "schema": "iobench.remote/2",
        "local": {
            "location": found.directory,
            "size_bytes": found.size_bytes,
            "free_bytes": found.free_bytes,
            "rate": rate(found.local_rate),
            "step": found.local_step,
        },
        "remote": {
            "location": found.remote,
            "rate": rate(found.remote_rate),
            "step": found.remote_step,
            "lag_s": found.lag_s,
            "past_lag": found.past_lag,
            "superseded": found.superseded,
            "waits": found.waits,
            "waited_s": found.waited_s,
            "failure": found.failure or None,
        },
        "damaged_lines": found.damaged_lines,
        "steps_at_risk": found.steps_at_risk,
        "decisions": [
            {"step": one.step, "tier": one.tier, "why": one.why, "age_s": one.age_s}
            for one in found.decisions
        ],
        "checkpoints": [
            {
                "step": one.step,
                "size_bytes": one.size_bytes,
                "optimizer_bytes": one.optimizer_bytes,
                "age_s": one.age_s,
                "local": "damaged" if one.serial is None else "durable",
                "remote": one.remote,
            }
            for one in found.checkpoints
        ],
    }
