"""Table of the values that an anonymised copy of a record leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from iobench.report.grid import Grid, write_grids_as_table
from iobench.results.scrub import Removed
from iobench.text import printable
from iobench.units import count_of

__all__ = ["write"]


def write(removed: Sequence[Removed], stream: TextIO) -> None:
    """Write one row for each value: where it was first, the value, and its replacement."""
    columns = (("field", False), ("old value", False), ("new value", False), ("times", True))
    rows = [[one.where, printable(one.old), one.new, str(one.count)] for one in removed]
    heading = f"{count_of(len(removed), 'value')} removed"
    grids = [Grid(columns=columns, rows=rows, drop=(3,))] if removed else []
    note = "read the copy before you publish it: names of your own, such as the workload's, stay"
    write_grids_as_table([heading], grids, [note], stream)
