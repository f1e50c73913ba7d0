"""Kinds of records: how each is read, and the functions that print it and make its page.

A new kind is one entry of `KINDS`, and of `_SCHEMAS` if its files have a schema of their own.
Modules are named here and imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from iobench.errors import UsageError
from iobench.report.page.page import Page
from iobench.report.render import DocumentFormat, ReportFormat
from iobench.results import ResultFile, read
from iobench.results.reader import family_of

__all__ = ["KINDS", "RecordKind", "kind_of", "page_of"]


@dataclass(frozen=True, kw_only=True)
class RecordKind:
    """One kind of record. `page`, `text` and `details` are functions, as `module:function`.

    `page` makes a page of several records, and `text` writes one of them to a stream in a format,
    of `formats`. `details` writes the table with all details; empty where the table always has
    them. A record is what the reader of its schema returns.
    """

    page: str
    text: str
    details: str = ""
    formats: tuple[ReportFormat | DocumentFormat, ...] = tuple(DocumentFormat)

    def page_of(self, records: Sequence[Any]) -> Page:
        """Return the page of records of this kind."""
        page: Page = _named(self.page)(records)
        return page

    def write(self, record: Any, form: str, stream: TextIO, *, details: bool = False) -> None:
        """Write `record` as text, in the one of `formats` that has the name `form`."""
        write = _named(self.details if details else self.text)
        write(record, next(one for one in self.formats if one == form), stream)


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


KINDS = {
    "iobench run": RecordKind(
        page="iobench.report.page.run_page:run_page",
        text="iobench.report.render:write_result",
        details="iobench.report.render:write_details",
        formats=tuple(ReportFormat),
    ),
    "iobench train": RecordKind(
        page="iobench.report.page.train_page:train_page", text="iobench.report.training:write"
    ),
    "iobench autotune": RecordKind(
        page="iobench.report.page.tuning_page:tuning_page",
        text="iobench.report.tuning:write_journal",
    ),
}
"""By the verb that writes the record."""


def _read_result(path: Path) -> tuple[str, ResultFile]:
    result = read(path)
    return ("iobench train" if result.training else "iobench run"), result


_SCHEMAS: Mapping[str, Callable[[Path], tuple[str, Any]]] = {
    "iobench.tune": lambda path: ("iobench autotune", path)
}
"""The reader of each family of schemas: it returns the kind and the record. `_read_result` reads
all others, and says what is wrong with them."""


def kind_of(path: Path) -> tuple[str, Any]:
    """Return the kind of the record at `path`, by the schema of its first line, and the record.

    Raises ResultFileError for a file that is not a record.
    """
    return _SCHEMAS.get(family_of(path), _read_result)(path)


def page_of(paths: Sequence[str | os.PathLike[str]]) -> Page:
    """Return the page of the records at `paths`, all of one kind.

    Raises ResultFileError for a file that is not a record, UsageError for records that have no
    common page.
    """
    found = [(path, *kind_of(Path(path))) for path in paths]
    kinds = {name for _, name, _ in found}
    if len(kinds) > 1:
        which = ", ".join(f"{path} is of {name}" for path, name, _ in found)
        raise UsageError(f"{which}; make one page for each kind")
    return KINDS[kinds.pop()].page_of([record for _, _, record in found])
