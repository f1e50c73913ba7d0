"""Kinds of records: how a file is read, and which function makes its document.

Modules are imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.report.document import Document
from iobench.results import read
from iobench.results.file import family_of


def _read(path: Path) -> tuple[str, str, Any]:
    """Return the verb that writes such a record, the function of its document, and the record."""
    if family_of(path) == "iobench.tune":
        return "iobench autotune", "tuning:tuning_document", path
    result = read(path)  # it says what is wrong with any other file
    if result.training:
        return "iobench train", "train:train_document", result
    return "iobench run", "run:run_document", result


def document_of(paths: Sequence[str | os.PathLike[str]]) -> Document:
    """Return the document of the records at `paths`, all of one kind.

    Raises ResultFileError for a file that is not a record, UsageError for records that have no
    common document.
    """
    verbs, functions, records = zip(*(_read(Path(path)) for path in paths), strict=True)
    if len({*verbs}) > 1:
        each = zip(paths, verbs, strict=True)
        which = ", ".join(f"{path} is of {verb}" for path, verb in each)
        raise UsageError(f"{which}; make one page for each kind")
    module, _, function = functions[0].partition(":")
    make: Callable[[Sequence[Any]], Document] = getattr(
        import_module(f"iobench.report.{module}"), function
    )
    return make(records)
