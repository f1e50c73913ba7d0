"""`iobench tiers`: where the copies of a run's checkpoints are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from iobench.cli.given import FormatOption
from iobench.report.render import render
from iobench.text import printable
from iobench.units import count_of, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.remote.journal import CheckpointCopies, TiersStatus

_ROWS = 12


def tiers(directory: Path, format_: FormatOption = "table") -> None:
    """Show where checkpoints are, and what is lost if the node dies.

    It reads the directory and its journal. The remote tier is not asked.

    Arguments:
        DIRECTORY: The directory of a Checkpointer with tiers=[Remote(...)].
    """
    from iobench.remote.journal import JOURNAL, tiers_status
    from iobench.report.document import Document
    from iobench.report.grid import Column, Grid

    found = tiers_status(directory)
    if found.damaged_lines:
        lines = count_of(found.damaged_lines, "damaged line")
        print(f"{printable(str(directory / JOURNAL))}: {lines} left out", file=sys.stderr)
    columns: tuple[Column[CheckpointCopies], ...] = (
        Column("step", lambda one: str(one.step)),
        Column("size", _size),
        Column("age", lambda one: format_seconds(one.age_s)),
        Column("local", lambda one: one.local, figure=False),
        Column("remote", lambda one: one.remote, figure=False),
    )
    earlier = len(found.checkpoints) - _ROWS
    document = Document(
        kind="iobench tiers",
        title=f"if this node dies now, lost: {_lost(found)}",
        about=tuple(_tiers(found)),
        tables=(Grid.of(found.checkpoints[-_ROWS:], columns),),
        notes=(f"and {count_of(earlier, 'earlier step')}",) if earlier > 0 else (),
        data={
            "schema": "iobench.tiers/5",
            **asdict(found),
            "steps_at_risk": found.steps_at_risk,
        },
    )
    render(document, format_, sys.stdout)


def _size(one: CheckpointCopies) -> str:
    return "" if one.size_bytes is None else format_size(one.size_bytes + one.optimizer_bytes)


def _tiers(found: TiersStatus) -> Iterator[str]:
    """Yield both tiers, how long copies wait, and the error of the last attempt."""
    waits = f", the oldest copy waits {format_seconds(found.backlog_s)}" if found.backlog_s else ""
    yield f"local   {found.directory}"
    yield f"remote  {found.remote}{waits}"
    if found.failure:
        yield f"        last attempt failed: {found.failure}"


def _lost(found: TiersStatus) -> str:
    """Return what is in no remote tier."""
    if found.local_step is None:
        return "nothing, there is no checkpoint yet"
    if found.steps_at_risk is None:
        return f"all {count_of(found.local_step, 'step')}, the remote tier has no checkpoint"
    if found.steps_at_risk:
        steps = count_of(found.steps_at_risk, "step")
        return f"{steps}, from {found.remote_step} to {found.local_step}, and what followed"
    return f"what was trained after step {found.remote_step}"
