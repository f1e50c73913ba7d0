"""`iobench results`: prepare result files for publication."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iobench.cli.given import check_output
from iobench.text import printable
from iobench.units import count_of

if TYPE_CHECKING:
    from iobench.report.document import Document
    from iobench.results.scrub import Removed

app = typer.Typer(no_args_is_help=True, help="Prepare result files for publication.")


@app.callback()
def _group() -> None:
    """Without it typer would make the only verb of the group the group itself."""


@app.command()
def scrub(record: Path, output: Path) -> None:
    """Write an anonymised copy of a record, and list what it leaves out.

    Numbers, facts of hardware and software and the words of iobench stay; host names, paths, users,
    addresses and all other words do not.

    Arguments:
        RECORD: A result file, or a journal of iobench autotune.

    Options:
        -o, --output FILE: The copy; it must not exist.
    """
    from iobench.report.render import render
    from iobench.results.scrub import write_scrubbed

    check_output(output)
    removed = write_scrubbed(record, output, _reader(record))
    render(_document(removed), "table", sys.stdout)
    print(f"wrote     {output}", file=sys.stderr)


def _reader(path: Path) -> Callable[[Path], object]:
    """Return the function that reads a file of this kind, by its first line."""
    from iobench.results import read
    from iobench.results.file import family_of
    from iobench.tune.journal import read_journal

    return read_journal if family_of(path) == "iobench.tune" else read


def _document(removed: Sequence[Removed]) -> Document:
    """Return one row for each value: where it was first, the value, and its replacement."""
    from iobench.report.document import Document
    from iobench.report.grid import Column, Grid

    columns: tuple[Column[Removed], ...] = (
        Column("field", lambda one: one.where, figure=False),
        Column("old value", lambda one: printable(one.old), figure=False),
        Column("new value", lambda one: one.new, figure=False),
        Column("times", lambda one: str(one.count), 1),
    )
    return Document(
        kind="iobench results scrub",
        title=f"{count_of(len(removed), 'value')} removed",
        tables=(Grid.of(removed, columns),) if removed else (),
    )
