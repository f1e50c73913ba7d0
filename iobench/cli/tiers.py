"""`iobench tiers`: where the copies of a run's checkpoints are."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.cli.given import FormatOption
from iobench.report.render import render
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
    from iobench.report.document import Document
    from iobench.report.grid import Column, Grid, words

    memory = memory_status(directory)
    found = None
    if memory is None or any(one.event == "remote" for one in DrainJournal(directory).events()):
        found = tiers_status(directory)
    if found is not None and found.damaged_lines:
        lines = count_of(found.damaged_lines, "damaged line")
        print(f"{printable(str(directory / JOURNAL))}: {lines} left out", file=sys.stderr)
    columns = (
        *(Column[list[str]](name) for name in ("step", "size", "age")),
        *words("local", "remote", "memory"),
    )
    rows = _rows(found, memory)
    earlier = count_of(len(rows) - _ROWS, "earlier step")
    document = Document(
        kind="iobench tiers",
        title=f"if this node dies now, lost: {_lost(found, memory)}",
        about=tuple(_tiers(found, memory)),
        tables=(Grid(columns=columns, rows=rows[-_ROWS:]),),
        notes=(f"and {earlier}",) if len(rows) > _ROWS else (),
        data=_data(found, memory),
    )
    render(document, format_, sys.stdout)


def _tiers(found: TiersStatus | None, memory: MemoryStatus | None) -> Iterator[str]:
    """Yield each tier, and what is known of it."""
    if found is not None:
        waits = f", the oldest copy waits {format_seconds(found.backlog_s)}"
        yield f"local   {found.directory}"
        yield f"remote  {found.remote}{waits if found.backlog_s else ''}"
        if found.failure:
            yield f"        last attempt failed: {found.failure}"
    if memory is not None:
        ranks = f", rank 0 of {memory.ranks}: its share" if memory.ranks > 1 else ""
        yield f"memory  of process {memory.pid}{ranks}"
        for one in memory.tiers:
            used = f"{format_size(one.used_bytes)} of {format_size(one.size_bytes)} used"
            yield f"        {one.tier}: {used}"


def _rows(found: TiersStatus | None, memory: MemoryStatus | None) -> list[list[str]]:
    """Return the row of each step, with the places where it is."""
    rows: dict[int, list[str]] = {}
    for one in found.checkpoints if found is not None else ():
        size = (one.size_bytes or 0) + one.optimizer_bytes
        shown = "" if one.local == "damaged" else format_size(size)
        age = format_seconds(one.age_s)
        rows[one.step] = [str(one.step), shown, age, one.local, one.remote, ""]
    for held in memory.snapshots if memory is not None else ():
        age = format_seconds(max(0.0, time.time() - held.created_s))
        new = [str(held.step), format_size(held.size_bytes), age, "", "", ""]
        state = "written" if held.written else "volatile"
        rows.setdefault(held.step, new)[-1] = f"{state}, {held.tier}"
    return [rows[step] for step in sorted(rows)]


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


def _data(found: TiersStatus | None, memory: MemoryStatus | None) -> dict[str, Any]:
    document: dict[str, Any] = {"schema": "iobench.tiers/4"}
    if found is not None:
        document |= {**asdict(found), "steps_at_risk": found.steps_at_risk}
    held = None
    if memory is not None:
        held = {**asdict(memory), "backlog_s": memory.backlog_s(time.time())}
    return {**document, "memory": held}
