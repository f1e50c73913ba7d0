"""Findings of `iobench reproduce` as a terminal table, Markdown or JSON (`iobench.findings/3`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TextIO

from iobench.bench.judging.stats import interval_heading
from iobench.claims.claims import ClaimFinding, ClaimMeasure, Study
from iobench.report.grid import Grid
from iobench.report.render import DocumentFormat, write_grids, write_json
from iobench.results import ResultFile

__all__ = ["SCHEMA", "figure", "grid", "heading", "notes", "write"]

SCHEMA = "iobench.findings/3"

_MISSING = "-"


def write(
    study: Study,
    records: Sequence[ResultFile],
    findings: Sequence[ClaimFinding],
    form: DocumentFormat,
    stream: TextIO,
) -> None:
    """Write heading, table and settings; in JSON `ours` is a ratio or a share of the wall clock."""
    if form is not DocumentFormat.JSON:
        below = notes(records, findings)
        write_grids(form, [heading(study)], [grid(findings)], below, stream)
        return
    document = {
        "schema": SCHEMA,
        "study": study.name,
        "source": study.source,
        "records": [str(record.path) for record in records],
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(document, stream)


def heading(study: Study) -> str:
    """Return the name and the source of the claims."""
    return f"{study.name}: {study.source}"


def grid(findings: Sequence[ClaimFinding]) -> Grid:
    """Return the table of claims, figures and answers."""
    rows = []
    for one in findings:
        ours = [] if one.ours is None else [one.ours]
        figures = [figure(value, one.claim.measure) for value in (*ours, *(one.ci95 or ()))]
        rows.append(
            [
                one.claim.workload,
                one.claim.text,
                ("at most " if one.bound else "") + figures[0] if ours else _MISSING,
                " to ".join(figures[1:]) or _MISSING,
                str(one.answer),
                one.reason,
            ]
        )
    columns = (
        ("workload", False),
        ("claim", False),
        ("here", True),
        (interval_heading(one.pairs for one in findings), True),
        ("holds", False),
        ("why", False),
    )
    return Grid(columns=columns, rows=rows, sentences=(len(columns) - 1,))


def figure(value: float, measure: ClaimMeasure) -> str:
    """Return `1.70x`, or the change of the wall clock as `-12.0%`."""
    match measure:
        case "wall clock":
            return f"{-100 * value:+.1f}%"
        case "overhead":
            return f"{100 * value:+.1f}%"
    return f"{value:.2f}x"


def notes(records: Sequence[ResultFile], findings: Sequence[ClaimFinding]) -> Iterator[str]:
    """Yield the setting of each figure, and the records."""
    for one in findings:
        yield f"{one.claim.workload}, {one.claim.text}: {one.setting}"
    for record in records:
        yield f"record: {record.path}"
