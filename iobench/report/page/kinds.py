"""Kinds of records that a report can be made of: how each is read, and the function of its page.

A new kind is one entry of `KINDS`. Modules are named here and imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.report.page.page import Page
from iobench.results import ResultFile, read

__all__ = ["KINDS", "RecordKind", "page_of"]


@dataclass(frozen=True, kw_only=True)
class RecordKind:
    """One kind of record: `reads` returns what `page`, `module:function`, makes a page of.

    `reads` returns None for a file of another kind.
    """

    reads: Callable[[Path], Any]
    page: str

    def page_of(self, records: Sequence[Any]) -> Page:
        """Return the page of records of this kind."""
        module, _, name = self.page.partition(":")
        page: Page = getattr(import_module(module), name)(records)
        return page


def _read_run(path: Path) -> ResultFile | None:
    result = read(path)
    return None if result.training else result


def _read_training(path: Path) -> ResultFile | None:
    result = read(path)
    return result if result.training else None


def _read_tuning(path: Path) -> Path | None:
    """Return `path` if it is a journal of a tuning. Other readers report a missing file."""
    from iobench.tune.journal import SCHEMA  # not tuning_page, which imports torch

    family = f'{{"schema": "{SCHEMA.partition("/")[0]}/'.encode()
    try:
        with path.open("rb") as file:
            return path if file.read(len(family)) == family else None
    except OSError:
        return None


KINDS = {
    "iobench autotune": RecordKind(
        reads=_read_tuning, page="iobench.report.page.tuning_page:tuning_page"
    ),
    "iobench train": RecordKind(
        reads=_read_training, page="iobench.report.page.train_page:train_page"
    ),
    "iobench run": RecordKind(reads=_read_run, page="iobench.report.page.run_page:run_page"),
}
"""The kinds in the order in which they are tried. The first one that reads a file decides; the
last one raises for files of no kind."""


def page_of(paths: Sequence[str | os.PathLike[str]]) -> Page:
    """Return the page of the records at `paths`, all of one kind.

    Raises ResultFileError for a file that is not a record, UsageError for records that have no
    common page.
    """
    found = [(path, *_recognised(Path(path))) for path in paths]
    kinds = {name for _, name, _ in found}
    if len(kinds) > 1:
        which = ", ".join(f"{path} is of {name}" for path, name, _ in found)
        raise UsageError(f"{which}; make one report for each kind")
    return KINDS[kinds.pop()].page_of([record for _, _, record in found])


def _recognised(path: Path) -> tuple[str, Any]:
    for name, kind in KINDS.items():
        record = kind.reads(path)
        if record is not None:
            return name, record
    raise UsageError(f"{path}: no report can be made of this kind of record yet")
