"""`iobench report`: another name of `iobench show -o FILE.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iobench.cli.show import RecordsArgument, ShowFormat, show


def report(
    records: RecordsArgument,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The page: one HTML file; an older one is replaced."),
    ],
) -> None:
    """Make one HTML page of records: iobench show -o FILE.html."""
    show(records, ShowFormat.HTML, output)
