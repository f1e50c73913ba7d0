"""What a measurement leaves that stopped early, by Ctrl-C or an error: its record and its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iobench.cli.report import write_report
from iobench.cli.servers import print_warning
from iobench.errors import IobenchError, ResultFileError

if TYPE_CHECKING:
    from iobench.results import ResultFile

__all__ = ["read_stopped", "report_stopped"]


def read_stopped(path: Path) -> ResultFile | None:
    """Return the record so far; None if no file can be read."""
    from iobench.results import read

    try:
        return read(path)
    except ResultFileError:  # the error that stopped the command is reported instead
        return None


def report_stopped(record: Path, page: Path | None) -> None:
    """Write `page`, of what is in `record`; nothing where nothing was measured.

    A failure is a warning: the error that stopped the command counts.
    """
    if page is None or not record.exists():
        return
    from iobench.report.kinds import document_of

    try:
        found = document_of([record])
        if found.charts:
            write_report(found, page)
        else:
            print("no report: nothing was measured yet", file=sys.stderr)
    except IobenchError as error:
        print_warning(f"no report: {error}")
