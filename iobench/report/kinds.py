"""Kinds of records: how a file is read, and which function makes its document.

Modules are imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from iobench.report.document import Document, Line, Section
from iobench.results import read
from iobench.results.file import family_of
from iobench.text import printable

_NOTE = (
    "these were not measured in turns: a difference between them may be the time of day; "
    "iobench compare judges that of runs"
)


def document_of(paths: Sequence[str | os.PathLike[str]]) -> Document:
    """Return the document of the record at `paths`, or of several, one below the other.

    Raises ResultFileError for a file that is not a record.
    """
    documents = [_document(Path(path)) for path in paths]
    return documents[0] if len(documents) == 1 else _together(documents)


def _document(path: Path) -> Document:
    if family_of(path) == "iobench.tune":
        from iobench.report.tuning import tuning_document

        return tuning_document(path)
    result = read(path)  # it says what is wrong with any other file
    if result.training:
        from iobench.report.train import train_document

        return train_document(result)
    from iobench.report.run import run_document

    return run_document(result)


def _together(documents: Sequence[Document]) -> Document:
    """Return the document of several: first the answer of each, then the sections of each."""
    named = {
        f"{number}: {printable(one.records[0].stem)}": one
        for number, one in enumerate(documents, 1)
    }
    answers = {
        name: [line for line in one.answer if not line.commands and not line.caveat]
        for name, one in named.items()
    }
    return Document(
        kind="iobench show",
        title=f"{len(documents)} records",
        about=tuple(f"{name}: {one.title}" for name, one in named.items()),
        answer=(
            *(
                Line(name, tuple(f"{line.subject}: {line.texts[0]}" for line in lines))
                for name, lines in answers.items()
                if lines
            ),
            Line("Note", (_NOTE,), caveat=True),
        ),
        draw=lambda: [Section(heading=name, sections=one.sections) for name, one in named.items()],
        records=tuple(path for one in documents for path in one.records),
    )
