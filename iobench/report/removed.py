"""The document of the values that an anonymised copy of a record leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.report.document import Document
from iobench.report.grid import Grid
from iobench.results.scrub import Removed
from iobench.text import printable
from iobench.units import count_of

__all__ = ["removed_document"]

_NOTE = "read the copy before you publish it: names of your own, such as the workload's, stay"


def removed_document(removed: Sequence[Removed]) -> Document:
    """Return one row for each value: where it was first, the value, and its replacement."""
    columns = (("field", False), ("old value", False), ("new value", False), ("times", True))
    rows = [[one.where, printable(one.old), one.new, str(one.count)] for one in removed]
    return Document(
        kind="iobench results scrub",
        title=f"{count_of(len(removed), 'value')} removed",
        tables=(Grid(columns=columns, rows=rows, drop=(3,)),) if removed else (),
        notes=(_NOTE,),
    )
