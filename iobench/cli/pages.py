"""Pages and pictures of documents: `iobench show -o`, and `--format html` of other verbs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from iobench.cli.given import check_place
from iobench.errors import IobenchError, UnavailableError, UsageError
from iobench.report.render import render

if TYPE_CHECKING:
    from iobench.report.document import Document

_NEEDS = ("altair", "jinja2", "vl_convert")
_PAGE_SUFFIXES = (".html", ".htm")
_MARK = b'name="generator" content="iobench show'
_HEAD_BYTES = 4096


def check_libraries() -> None:
    """Raise UnavailableError without the libraries that pages and pictures need."""
    missing = [name for name in _NEEDS if util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "a page or a picture",
            f"{', '.join(missing)} is not installed.",
            "Type: pip install 'iobench[report]'.",
        )


def check_page(path: Path, form: str) -> None:
    """Raise UsageError for a page, or a picture, that cannot be written or replaces another file.

    UnavailableError without the libraries.
    """
    check_libraries()
    suffixes = _PAGE_SUFFIXES if form == "html" else (f".{form}",)
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"-o {path}: the name must end with {' or '.join(suffixes)}")
    check_place(path)
    if form == "html" and path.exists():
        with path.open("rb") as file:
            ours = _MARK in file.read(_HEAD_BYTES)
        if not ours:
            raise UsageError(f"-o {path}: exists and is not a report; choose another name")


def write_file(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, atomically; durable on return. Raises UsageError."""
    from iobench.writers.local.new_file import write_bytes

    try:
        write_bytes(path, data)
    except OSError as error:
        raise UsageError(f"-o {path}: cannot be written ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The format in which a verb shows its document on stdout.

    Raises UsageError for a page on a terminal, UnavailableError without the libraries of pages.
    """

    form: str
    details: bool = False

    def __post_init__(self) -> None:
        if self.form == "html":
            check_libraries()
            if sys.stdout.isatty():
                raise UsageError("--format html: is a file; add > page.html")

    def show(self, document: Document, record: Path | None = None) -> None:
        """Print `document`, then the name of its `record` on stderr."""
        render(document, self.form, sys.stdout, details=self.details)
        if record is not None:
            print(f"record: {record}", file=sys.stderr)

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
