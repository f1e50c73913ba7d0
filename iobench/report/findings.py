"""Findings of `iobench reproduce` as a terminal table, Markdown or JSON (`iobench.findings/2`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TextIO

from iobench.bench.judging.stats import interval_heading
from iobench.claims.claims import ClaimFinding, ClaimMeasure, Study
from iobench.report.grid import Grid, write_grids_as_markdown, write_grids_as_table
from iobench.results import ResultFile

__all__ = ["SCHEMA", "write_json", "write_markdown", "write_table"]

SCHEMA = "iobench.findings/2"

_MISSING = "-"


def write_table(
    study: Study, records: Sequence[ResultFile], findings: Sequence[ClaimFinding], stream: TextIO
) -> None:
    """Write heading, table and settings to `stream`."""
    write_grids_as_table([_heading(study)], [_grid(findings)], _notes(records, findings), stream)


def write_markdown(
    study: Study, records: Sequence[ResultFile], findings: Sequence[ClaimFinding], stream: TextIO
) -> None:
    """Write a heading, the table and a list of settings."""
    write_grids_as_markdown([_heading(study)], [_grid(findings)], _notes(records, findings), stream)


def write_json(
    study: Study, records: Sequence[ResultFile], findings: Sequence[ClaimFinding], stream: TextIO
) -> None:
    """Write one document and a newline; `ours` is a ratio or a share of the wall clock."""
    document = {
        "schema": SCHEMA,
        "study": study.name,
        "source": study.source,
        "records": [str(record.path) for record in records],
        "findings": [asdict(finding) for finding in findings],
    }
    json.dump(document, stream, indent=2, allow_nan=False)
    stream.write("\n")


def _heading(study: Study) -> str:
    return f"{study.name}: {study.source}"


def _grid(findings: Sequence[ClaimFinding]) -> Grid:
    rows = []
    for one in findings:
        low_high = [one.interval.low, one.interval.high] if one.interval else []
        ours = [] if one.ours is None else [one.ours]
        figures = [_figure(value, one.claim.measure) for value in (*ours, *low_high)]
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


def _figure(value: float, measure: ClaimMeasure) -> str:
    match measure:
        case "wall clock":
            return f"{-100 * value:+.1f}%"
        case "overhead":
            return f"{100 * value:+.1f}%"
    return f"{value:.2f}x"


def _notes(records: Sequence[ResultFile], findings: Sequence[ClaimFinding]) -> Iterator[str]:
    for one in findings:
        yield f"{one.claim.workload}, {one.claim.text}: {one.setting}"
    for record in records:
        yield f"record: {record.path}"
