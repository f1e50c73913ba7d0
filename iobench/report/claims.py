"""The document of `iobench reproduce`: each published claim next to what was measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from iobench.claims.claims import Answer, ClaimFinding, ClaimMeasure, Study
from iobench.report.document import Document, Line
from iobench.report.facts import environment_section, moment, repeat_section
from iobench.report.grid import MISSING, Column, Grid, shown
from iobench.results import ResultFile
from iobench.stats.estimates import interval_heading
from iobench.units import count_of

SCHEMA = "iobench.findings/5"

_ANSWERS = {
    Answer.YES: "Shown here",
    Answer.NO: "Not so here",
    Answer.UNDECIDED: "Undecided",
    Answer.NOT_COMPARABLE: "Not comparable",
}


def claims_document(
    study: Study, records: Sequence[ResultFile], findings: Sequence[ClaimFinding]
) -> Document:
    """Return the document of the findings about `study`, with the records that decided them.

    In JSON `ours` is a ratio or a share of the wall clock.
    """
    return Document(
        kind="iobench reproduce",
        title=f"{study.name}: {study.source}",
        about=tuple(f"{one.path}, measured {moment(one.run.started_at)}" for one in records),
        answer=tuple(_answer(findings)),
        tables=(_grid(findings),),
        notes=tuple(f"{one.claim.workload}, {one.claim.text}: {one.setting}" for one in findings),
        data={
            "schema": SCHEMA,
            "study": study.name,
            "source": study.source,
            "records": [str(record.path) for record in records],
            "findings": [asdict(finding) for finding in findings],
        },
        rows="findings",
        appendix=(environment_section(records[-1].run), repeat_section(*records)),
        records=tuple(one.path for one in records),
    )


def _grid(findings: Sequence[ClaimFinding]) -> Grid:
    columns: tuple[Column[ClaimFinding], ...] = (
        Column("workload", lambda one: one.claim.workload, figure=False),
        Column("claim", lambda one: one.claim.text, figure=False),
        Column("here", _ours),
        Column(interval_heading(one.pairs for one in findings), _interval),
        Column("holds", lambda one: str(one.answer), figure=False),
        Column("why", lambda one: one.reason, figure=False, sentence=True),
    )
    return Grid.of(findings, columns)


def _ours(one: ClaimFinding) -> str:
    return shown(one.ours, lambda ours: _figure(ours, one.claim.measure))


def _interval(one: ClaimFinding) -> str:
    ends = [_figure(end, one.claim.measure) for end in one.ci95 or ()]
    if one.claim.measure == "wall clock":  # shown with the other sign
        ends.reverse()
    return " to ".join(ends) or MISSING


def _figure(value: float, measure: ClaimMeasure) -> str:
    """Return `1.70x`, or the change of the wall clock as `-12.0%`."""
    match measure:
        case "wall clock":
            return f"{-100 * value:+.1f}%"
        case "overhead":
            return f"{100 * value:+.1f}%"
    return f"{value:.2f}x"


def _answer(findings: Sequence[ClaimFinding]) -> Iterator[Line]:
    for answer, says in _ANSWERS.items():
        which = [one for one in findings if one.answer is answer]
        if which:
            texts = [f"{one.claim.workload}, {one.claim.text}: {_here(one)}" for one in which]
            yield Line(f"{says}: {count_of(len(which), 'claim')}", tuple(texts))


def _here(one: ClaimFinding) -> str:
    """Return `1.49x here`, and why the claim is not answered by it where that is so."""
    if one.ours is None:
        return one.reason
    here = f"{_ours(one)} here"
    return here if one.answer in (Answer.YES, Answer.NO) else f"{here} ({one.reason})"
