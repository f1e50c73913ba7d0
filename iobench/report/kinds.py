"""Kinds of records: by the schema of a file, how it is read, and the function of its document.

A new kind is one entry of `_KINDS`, and of `_SCHEMAS` if its files have a schema of their own.
Modules are named here and imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.report.document import Document
from iobench.results import ResultFile, read
from iobench.results.file import family_of

__all__ = ["document_of"]

_KINDS = {
    "iobench run": "run:run_document",
    "iobench train": "train:train_document",
    "iobench autotune": "tuning:tuning_document",
}
"""The function that makes the document of several records, by the verb that writes the record."""


def _read_result(path: Path) -> tuple[str, ResultFile]:
    result = read(path)
    return ("iobench train" if result.training else "iobench run"), result


_SCHEMAS: Mapping[str, Callable[[Path], tuple[str, Any]]] = {
    "iobench.tune": lambda path: ("iobench autotune", path)
}
"""The reader of each family of schemas: it returns the kind and the record. `_read_result` reads
all others, and says what is wrong with them."""


def document_of(paths: Sequence[str | os.PathLike[str]]) -> Document:
    """Return the document of the records at `paths`, all of one kind by the schema of each.

    Raises ResultFileError for a file that is not a record, UsageError for records that have no
    common document.
    """
    found = [_SCHEMAS.get(family_of(path), _read_result)(path) for path in map(Path, paths)]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        each = zip(paths, found, strict=True)
        which = ", ".join(f"{path} is of {kind}" for path, (kind, _) in each)
        raise UsageError(f"{which}; make one page for each kind")
    module, _, function = _KINDS[kinds.pop()].partition(":")
    make: Callable[[Sequence[Any]], Document] = getattr(
        import_module(f"iobench.report.{module}"), function
    )
    return make([record for _, record in found])
