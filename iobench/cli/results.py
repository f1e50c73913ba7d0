"""`iobench results`: prepare result files for publication."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from iobench.cli.given import check_output

app = typer.Typer(no_args_is_help=True, help="Prepare result files for publication.")


@app.callback()
def _group() -> None:
    """Without it typer would make the only verb of the group the group itself."""


@app.command()
def scrub(
    record: Annotated[
        Path, typer.Argument(help="A result file, or a journal of iobench autotune.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The copy; it must not exist.")],
) -> None:
    """Write an anonymised copy of a record, and list what it leaves out.

    It leaves out host names, paths, users, network addresses and identifying mount options.
    """
    from iobench.report.removed import removed_document
    from iobench.report.render import ReportFormat, render
    from iobench.results.scrub import write_scrubbed

    check_output(output)
    removed = write_scrubbed(record, output, _reader(record), users=[getpass.getuser()])
    render(removed_document(removed), ReportFormat.TABLE, sys.stdout)
    print(f"wrote     {output}", file=sys.stderr)


def _reader(path: Path) -> Callable[[Path], object]:
    """Return the function that reads a file of this kind, by its first line."""
    from iobench.results import read
    from iobench.results.reader import family_of
    from iobench.tune.journal import read_journal

    return read_journal if family_of(path) == "iobench.tune" else read
