"""`iobench report`, which is `iobench show` as HTML; and the option --report of other verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.errors import UnavailableError, UnknownNameError, UsageError
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.report.document import Document

__all__ = [
    "REPORT_HELP",
    "RecordsArgument",
    "ReportOption",
    "check_picture",
    "check_report",
    "report",
    "write_picture",
    "write_report",
    "write_report_of",
]

_NEEDS = ("altair", "jinja2", "vl_convert")

RecordsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORD...",
        help="Records of iobench run, train or autotune. Several runs make one page.",
    ),
]
REPORT_HELP = "Also write the report as one HTML file with charts."
ReportOption = Annotated[Path | None, typer.Option("--report", help=REPORT_HELP)]


def report(
    records: RecordsArgument,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The page: one HTML file; an older one is replaced."),
    ],
) -> None:
    """Make one HTML page of records: iobench show -o FILE.html."""
    check_report(output, "-o")
    from iobench.report.kinds import document_of

    write_report(document_of(records), output, "-o")


def check_report(path: Path, option: str = "--report") -> None:
    """Raise UsageError if the page cannot be written, UnavailableError without the libraries."""
    _check_libraries()
    from iobench.report.page.output import check_page

    check_page(path, option)


def check_picture(path: Path, form: str) -> None:
    """Raise UsageError if the picture cannot be written, UnavailableError without the libraries."""
    _check_libraries()
    from iobench.report.page.output import check_figure

    check_figure(path, "-o", form)


def write_report(document: Document, path: Path, option: str = "--report") -> None:
    """Write the page of `document`, and print its name on stderr. Raises UsageError."""
    from iobench.report.page.html import html
    from iobench.report.page.output import write

    write(path, html(document).encode("utf-8", "backslashreplace"), option)
    print(f"report: {printable(str(path))}", file=sys.stderr)


def write_report_of(records: Sequence[Path], path: Path) -> None:
    """Write the page of the records, and print its name on stderr. Raises UsageError."""
    from iobench.report.kinds import document_of

    write_report(document_of(records), path)


def write_picture(document: Document, chart: str | None, path: Path) -> None:
    """Write one chart of `document`, and print its name on stderr. Raises UsageError."""
    from iobench.report.page.figure import draw
    from iobench.report.page.output import write

    charts = document.charts
    if not charts:
        raise UsageError(f"-o {path}: there is no chart, because nothing was measured")
    name = chart or next(iter(charts))
    if name not in charts:
        raise UnknownNameError("chart", name, charts)
    write(path, draw(charts[name], path.suffix.lower().lstrip(".")), "-o")
    print(f"picture: {printable(str(path))}", file=sys.stderr)


def _check_libraries() -> None:
    """Raise UnavailableError unless the extra `report` is installed."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "iobench report",
            f"{', '.join(missing)} is not installed.",
            "Type: pip install 'iobench[report]'.",
        )
