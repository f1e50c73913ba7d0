"""Pages and pictures of documents: `iobench show -o`, and the option --report of other verbs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobench.errors import IobenchError, UnavailableError, UnknownNameError, UsageError
from iobench.report.render import render
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.report.document import Document

_NEEDS = ("altair", "jinja2", "vl_convert")
_PAGE_SUFFIXES = (".html", ".htm")
_MARK = b'name="generator" content="iobench show'
_HEAD_BYTES = 4096

ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Also write the report as one HTML file with charts."
    ),
]


def check_report(path: Path, option: str = "--report", picture: str = "") -> None:
    """Raise UsageError for a page, or a picture, that cannot be written or replaces another file.

    UnavailableError without the libraries.
    """
    missing = [name for name in _NEEDS if util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "a page or a picture",
            f"{', '.join(missing)} is not installed.",
            "Type: pip install 'iobench[report]'.",
        )
    suffixes = (f".{picture}",) if picture else _PAGE_SUFFIXES
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: the name must end with {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(f"{option} {path}: {path.parent.absolute()} is not writable")
    if not picture and path.exists():
        with path.open("rb") as file:
            ours = _MARK in file.read(_HEAD_BYTES)
        if not ours:
            raise UsageError(f"{option} {path}: exists and is not a report; choose another name")


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


def write_file(path: Path, data: bytes, option: str) -> None:
    """Replace `path` with `data`, atomically; durable on return. Raises UsageError."""
    from iobench.writers.local.new_file import write_bytes

    try:
        write_bytes(path, data)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Where a verb shows its document: on stdout in the format `form`, and in `page` if given.

    Raises UsageError for a page that cannot be written, UnavailableError without the libraries.
    """

    form: str
    page: Path | None = None
    details: bool = False

    def __post_init__(self) -> None:
        if self.page is not None:
            check_report(self.page)

    def show(self, document: Document, record: Path | None = None) -> None:
        """Print `document`, then the name of its `record` on stderr; write the page."""
        render(document, self.form, sys.stdout, details=self.details)
        if record is not None:
            print(f"record: {record}", file=sys.stderr)
        if self.page is not None:
            write_report(document, self.page)

    @contextmanager
    def stopped(self, record: Path) -> Iterator[None]:
        """If the block raises, as when interrupted, show what is in `record`.

        An error in that is left out: what stopped the block counts.
        """
        try:
            yield
        except BaseException:
            with suppress(IobenchError):
                if record.exists():
                    self._show_stopped(record)
            raise

    def _show_stopped(self, record: Path) -> None:
        from iobench.report.kinds import document_of

        found = document_of([record])
        if any(grid.rows for grid in found.tables):
            self.show(found, record)
