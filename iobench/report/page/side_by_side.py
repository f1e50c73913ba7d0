"""Several records of `iobench run` next to each other: machines, dates or targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.report.alike import unlike
from iobench.report.answer import Line, answer
from iobench.report.grid import Grid
from iobench.report.page.page import Attachment, Page, Section
from iobench.report.page.rows import Measured
from iobench.report.wording import environment_line, heading
from iobench.text import printable

__all__ = ["side_by_side_page"]

_OPERATIONS = ("Save", "Restore")
_MISSING = "-"


def side_by_side_page(
    measured: Sequence[Measured], sections: Sequence[tuple[Section, ...]]
) -> Page:
    """Return the page of several records, with the `sections` of each below the overview."""
    return Page(
        kind="iobench run",
        title=f"{len(measured)} runs side by side",
        about=tuple(f"{_name(n, one)}: {heading(one.report)}" for n, one in enumerate(measured)),
        answer=tuple(Line(_name(n, one), tuple(_answers(one))) for n, one in enumerate(measured)),
        caveats=(
            Line(
                "Note",
                (
                    "these runs were not interleaved: a difference between them may be the time of "
                    "day; iobench compare judges it",
                ),
            ),
        ),
        sections=(
            _overview(measured),
            *_differences(measured),
            *(
                Section(heading=f"{_name(n, one)}", sections=parts)
                for n, (one, parts) in enumerate(zip(measured, sections, strict=True))
            ),
        ),
        attachments=tuple(Attachment.of(one.result.path) for one in measured),
    )


def _letter(position: int) -> str:
    """Return the name of a record in a page of several: A to Z, then numbers."""
    return chr(ord("A") + position) if position < 26 else str(position + 1)


def _name(position: int, one: Measured) -> str:
    return f"{_letter(position)}: {printable(one.result.path.stem)}"


def _answers(one: Measured) -> Iterator[str]:
    found = [line for line in answer(one.report) if line.subject in _OPERATIONS]
    for line in found:
        yield f"{line.subject}: {line.texts[0]}"
    if not found:
        yield "nothing was measured, or nothing that can be ranked in one line"


def _overview(measured: Sequence[Measured]) -> Section:
    columns = (
        *(("record", False), ("measured", False), ("machine", False)),
        *(("fastest save", False), ("GiB/s", True), ("fastest restore", False), ("GiB/s", True)),
    )
    rows = []
    for position, one in enumerate(measured):
        best = [cell for operation in ("save", "restore") for cell in _best(one, operation)]
        facts = environment_line(one.report)
        rows.append([_letter(position), one.when, facts, *best])
    about = Grid(columns=columns, rows=rows, sentences=(2,))
    return Section(heading="Overview", grids=(about, *_medians(measured)))


def _medians(measured: Sequence[Measured]) -> Iterator[Grid]:
    """Yield the table of all medians: a row per operation and writer, a column per record."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for position, one in enumerate(measured):
        for row in one.rows:
            text = f"{row.median:.2f}" if row.counts else row.summary.verdict
            who = row.summary.operation, row.summary.label
            found.setdefault(who, {})[position] = text
    if found:
        letters = [(f"{_letter(position)}, GiB/s", True) for position in range(len(measured))]
        yield Grid(
            columns=(("operation", False), ("writer", False), *letters),
            rows=[
                [*who, *(cells.get(position, _MISSING) for position in range(len(measured)))]
                for who, cells in sorted(found.items(), key=lambda one: one[0][0] != "save")
            ],
        )


def _best(one: Measured, operation: str) -> tuple[str, str]:
    rows = [row for row in one.rows if row.counts and row.summary.operation == operation]
    if not rows:
        return _MISSING, _MISSING
    best = max(rows, key=lambda row: row.median)
    return best.summary.label, f"{best.median:.2f}"


def _differences(measured: Sequence[Measured]) -> Iterator[Section]:
    """Yield what differs from the first record and decides the figures."""
    first, *others = measured
    rows = [
        [_letter(position), text.replace(" before, ", " in A, ").removesuffix(" now")]
        for position, one in enumerate(others, 1)
        for text in unlike(first.result.run, one.result.run)
    ]
    if rows:
        columns = (("record", False), ("differs from A, the first record", False))
        yield Section(
            heading="What differs between the records",
            grids=(Grid(columns=columns, rows=rows, sentences=(1,)),),
        )
