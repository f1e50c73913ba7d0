"""Parts that several pages have: the tables and notes that the terminal prints, and commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from iobench.bench.judging.stats import interval_heading
from iobench.report.grid import Grid
from iobench.report.page.page import Chart, Section
from iobench.results import ResultFile

__all__ = ["charts_section", "commands_section", "spread_words", "tables_section"]


def charts_section(heading: str, charts: Iterable[Chart]) -> tuple[Section, ...]:
    """Return the section with `charts`; nothing where there are none."""
    drawn = tuple(charts)
    return (Section(heading=heading, charts=drawn),) if drawn else ()


def spread_words(samples: Iterable[int]) -> str:
    """Return how to read a row: median and interval, with the confidence of so many samples."""
    interval = interval_heading(samples).replace("\n", " ")
    return f"upright line: median; bar: its {interval}."


def tables_section(
    grids: Iterable[Grid], notes: Iterable[str], *, heading: str = "Figures"
) -> Section:
    """Return the section with `grids`, and `notes` as one more table."""
    rows = [[note] for note in notes]
    below = [Grid(columns=(("notes", False),), rows=rows)] if rows else []
    return Section(heading=heading, grids=(*grids, *below))


def commands_section(records: Iterable[ResultFile]) -> Section:
    """Return the section with the commands that made `records`."""
    commands = dict.fromkeys(shlex.join(one.run.command) for one in records)
    return Section(heading="Repeat it", commands=tuple(commands))
