"""`iobench tiers`: where the copies of a run's checkpoints are."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.cli.given import FormatOption
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import count_of, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.remote.journal import TiersStatus
    from iobench.remote.memory_status import MemoryStatus

_ROWS = 12


def tiers(directory: Path, format_: FormatOption = "table") -> None:
    """Show where checkpoints are, and what is lost if the node dies.

    It reads the directory, its journal, and the memory status of a process that runs. The
    remote tier is not asked.

    Arguments:
        DIRECTORY: The directory of a Checkpointer with tiers=[...].
    """
    from iobench.remote.journal import JOURNAL, DrainJournal, tiers_status
    from iobench.remote.memory_status import memory_status

    memory = memory_status(directory)
    found = None
    if memory is None or any(one.event == "remote" for one in DrainJournal(directory).events()):
        found = tiers_status(directory)
    if found is not None and found.damaged_lines:
        lines = count_of(found.damaged_lines, "damaged line")
        print(f"{printable(str(directory / JOURNAL))}: {lines} left out", file=sys.stderr)
    if format_ == "json":
        write_json(_document(found, memory), sys.stdout)
        return
    if found is not None:
        waits = f", the oldest copy waits {format_seconds(found.backlog_s)}"
        print(f"local   {printable(found.directory)}")
        print(f"remote  {printable(found.remote)}{waits if found.backlog_s else ''}")
        if found.failure:
            print(f"        last attempt failed: {printable(found.failure)}")
    if memory is not None:
        ranks = f", rank 0 of {memory.ranks}: its share" if memory.ranks > 1 else ""
        print(f"memory  of process {memory.pid}{ranks}")
        for one in memory.tiers:
            used = f"{format_size(one.used_bytes)} of {format_size(one.size_bytes)} used"
            print(f"        {printable(one.tier)}: {used}")
    print(f"if this node dies now, lost: {_lost(found, memory)}")
    _print_checkpoints(found, memory)


def _print_checkpoints(found: TiersStatus | None, memory: MemoryStatus | None) -> None:
    """Print one line for each step, with the places where it is."""
    rows: dict[int, tuple[int, float, str, str]] = {}
    for one in found.checkpoints if found is not None else ():
        size = (one.size_bytes or 0) + one.optimizer_bytes
        rows[one.step] = (size, one.age_s, one.local, f"{one.local:<7}  {one.remote:<10}")
    held = {one.step: one for one in (memory.snapshots if memory is not None else ())}
    for step, snapshot in held.items():
        age_s = max(0.0, time.time() - snapshot.created_s)
        rows.setdefault(step, (snapshot.size_bytes, age_s, "", f"{'':<7}  {'':<10}"))
    print(f"\n{'step':>10}  {'size':>10}  {'age':>10}  local    remote      memory")
    for step in sorted(rows)[-_ROWS:]:
        size, age_s, local, places = rows[step]
        shown = "" if local == "damaged" else format_size(size)
        state = ""
        if step in held:
            state = f"{'written' if held[step].written else 'volatile'}, {held[step].tier}"
        line = f"{step:>10}  {shown:>10}  {format_seconds(age_s):>10}  {places}  {printable(state)}"
        print(line.rstrip())
    if len(rows) > _ROWS:
        print(f"and {count_of(len(rows) - _ROWS, 'earlier step')}")


def _lost(found: TiersStatus | None, memory: MemoryStatus | None) -> str:
    """Return what is in no remote tier."""
    waiting = [one for one in (memory.snapshots if memory else ()) if not one.written]
    volatile = f"{count_of(len(waiting), 'snapshot')} that memory alone has" if waiting else ""
    if found is None or found.local_step is None:
        return volatile or "nothing, there is no checkpoint yet"
    if found.steps_at_risk is None:
        lost = f"all {count_of(found.local_step, 'step')}, the remote tier has no checkpoint"
    elif found.steps_at_risk:
        steps = count_of(found.steps_at_risk, "step")
        lost = f"{steps}, from {found.remote_step} to {found.local_step}, and what followed"
    else:
        lost = f"what was trained after step {found.remote_step}"
    return f"{lost}; {volatile}" if volatile else lost


def _document(found: TiersStatus | None, memory: MemoryStatus | None) -> dict[str, Any]:
    document: dict[str, Any] = {"schema": "iobench.tiers/4"}
    if found is not None:
        document |= {**asdict(found), "steps_at_risk": found.steps_at_risk}
    held = None
    if memory is not None:
        held = {**asdict(memory), "backlog_s": memory.backlog_s(time.time())}
    return {**document, "memory": held}
