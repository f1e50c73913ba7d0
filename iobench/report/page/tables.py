"""Parts that several pages have: the tables and notes that the terminal prints, and commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from iobench.report.grid import Grid
from iobench.report.page.page import Section
from iobench.results import ResultFile

__all__ = ["commands_section", "tables_section"]


def tables_section(grids: Iterable[Grid], notes: Iterable[str]) -> Section:
    """Return the section with `grids`, and `notes` as one more table."""
    rows = [[note] for note in notes]
    below = [Grid(columns=(("notes", False),), rows=rows)] if rows else []
    return Section(heading="Figures", grids=(*grids, *below))


def commands_section(records: Iterable[ResultFile]) -> Section:
    """Return the section with the commands that made `records`."""
    commands = dict.fromkeys(shlex.join(one.run.command) for one in records)
    return Section(heading="Repeat it", commands=tuple(commands))
