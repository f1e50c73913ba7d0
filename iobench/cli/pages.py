"""Pages and pictures of documents: `iobench show -o`, and the option --report of other verbs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.cli.given import print_warning
from iobench.errors import (
    IobenchError,
    ResultFileError,
    UnavailableError,
    UnknownNameError,
    UsageError,
)
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.report.document import Document
    from iobench.results import ResultFile

__all__ = [
    "REPORT_HELP",
    "ReportOption",
    "check_picture",
    "check_report",
    "read_stopped",
    "report_stopped",
    "write_file",
    "write_picture",
    "write_report",
]

_NEEDS = ("altair", "jinja2", "vl_convert")
_PAGE_SUFFIXES = (".html", ".htm")
_MARK = b'name="generator" content="iobench show'
_HEAD_BYTES = 4096

REPORT_HELP = "Also write the report as one HTML file with charts."
ReportOption = Annotated[Path | None, typer.Option("--report", help=REPORT_HELP)]


def check_report(path: Path, option: str = "--report") -> None:
    """Raise UsageError for a page that cannot be written, or would replace another file.

    UnavailableError without the libraries.
    """
    _check_libraries()
    _check(path, option, _PAGE_SUFFIXES)
    if path.exists():
        with path.open("rb") as file:
            ours = _MARK in file.read(_HEAD_BYTES)
        if not ours:
            raise UsageError(f"{option} {path}: exists and is not a report; choose another name")


def check_picture(path: Path, form: str) -> None:
    """Raise UsageError if the picture cannot be written, UnavailableError without the libraries."""
    _check_libraries()
    _check(path, "-o", (f".{form}",))


def write_report(document: Document, path: Path, option: str = "--report") -> None:
    """Write the page of `document`, and print its name on stderr. Raises UsageError."""
    from iobench.report.page.html import html

    write_file(path, html(document).encode("utf-8", "backslashreplace"), option)
    print(f"report: {printable(str(path))}", file=sys.stderr)


def write_picture(document: Document, chart: str | None, path: Path) -> None:
    """Write one chart of `document`, and print its name on stderr. Raises UsageError."""
    from iobench.report.page.html import draw

    charts = document.charts
    if not charts:
        raise UsageError(f"-o {path}: there is no chart, because nothing was measured")
    name = chart or next(iter(charts))
    if name not in charts:
        raise UnknownNameError("chart", name, charts)
    write_file(path, draw(charts[name], path.suffix.lower().lstrip(".")), "-o")
    print(f"picture: {printable(str(path))}", file=sys.stderr)


def _check_libraries() -> None:
    """Raise UnavailableError unless the extra `report` is installed."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "a page or a picture",
            f"{', '.join(missing)} is not installed.",
            "Type: pip install 'iobench[report]'.",
        )


def write_file(path: Path, data: bytes, option: str) -> None:
    """Replace `path` with `data`, atomically; durable on return. Raises UsageError."""
    from iobench.writers.local.new_file import write_bytes

    try:
        write_bytes(path, data)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from error


def _check(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: the name must end with {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(f"{option} {path}: {path.parent.absolute()} is not writable")


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
        if any(grid.rows for grid in found.tables):
            write_report(found, page)
        else:
            print("no report: nothing was measured yet", file=sys.stderr)
    except IobenchError as error:
        print_warning(f"no report: {error}")
