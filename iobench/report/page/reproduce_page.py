"""The page of `iobench reproduce`: each published claim next to what was measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from iobench.claims.claims import Answer, ClaimFinding, ClaimMeasure, Study
from iobench.report.answer import Line
from iobench.report.findings import figure, grid, heading, notes
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import MarkLine, Spread, spread_spec
from iobench.report.page.environment import environment_section
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.palette import colour_of, shape_of
from iobench.report.page.rows import moment
from iobench.report.page.tables import commands_section, spread_words, tables_section
from iobench.results import ResultFile
from iobench.units import count_of

__all__ = ["reproduce_page"]

_ANSWERS = {
    Answer.YES: "Shown here",
    Answer.NO: "Not so here",
    Answer.UNDECIDED: "Undecided",
    Answer.NOT_COMPARABLE: "Not comparable",
}
_TIMES = MarkLine(x=1.0, label="no faster")
_SHARE = MarkLine(x=0.0, label="no change")
_PERCENT: Mapping[ClaimMeasure, float] = {"wall clock": -100.0, "overhead": 100.0}
"""Factor from the unit of a claim to the change of the wall clock in percent."""


def reproduce_page(
    study: Study, records: Sequence[ResultFile], findings: Sequence[ClaimFinding]
) -> Page:
    """Return the page of the findings about `study`, with the records that decided them."""
    return Page(
        kind="iobench reproduce",
        title=heading(study),
        about=tuple(f"{one.path}, measured {moment(one.run.started_at)}" for one in records),
        answer=tuple(_answer(findings)),
        sections=(
            Section(heading="Claims and what was measured", charts=tuple(_charts(findings))),
            tables_section([grid(findings)], notes(records, findings)),
            environment_section(records[-1].run),
            commands_section(records),
        ),
        attachments=tuple(Attachment.of(one.path) for one in records),
    )


def _answer(findings: Sequence[ClaimFinding]) -> Iterator[Line]:
    """Yield how many claims hold, do not hold or are open, and which."""
    for answer, says in _ANSWERS.items():
        which = [one for one in findings if one.answer is answer]
        if which:
            texts = [f"{one.claim.workload}, {one.claim.text}: {_here(one)}" for one in which]
            yield Line(f"{says}: {count_of(len(which), 'claim')}", tuple(texts))


def _here(one: ClaimFinding) -> str:
    """Return `1.49x here`, and why the claim is not answered by it where that is so."""
    if one.ours is None:
        return one.reason
    here = f"{'at most ' if one.bound else ''}{figure(one.ours, one.claim.measure)} here"
    return here if one.answer in (Answer.YES, Answer.NO) else f"{here} ({one.reason})"


def _charts(findings: Sequence[ClaimFinding]) -> Iterator[Chart]:
    """Yield the chart of what is faster or shorter, and that of the wall clock of training."""
    times = [one for one in findings if one.claim.measure not in _PERCENT]
    share = [one for one in findings if one.claim.measure in _PERCENT]
    if times:
        yield _chart("claims-times", "How many times as fast", times, "times as fast", _TIMES)
    if share:
        title = "Wall clock of training"
        yield _chart("claims-wall-clock", title, share, "change of the wall clock, %", _SHARE)


def _chart(
    name: str, title: str, findings: Sequence[ClaimFinding], axis: str, mark: MarkLine
) -> Chart:
    rows = [_row(one) for one in findings]
    spoken = "; ".join(f"{row.label} {row.figure}" for row in rows)
    return Chart(
        name=name,
        title=title,
        alt=f"Claims and figures measured here: {spoken}.",
        caption="Diamond: the published claim; measured here, "
        f"{spread_words(one.pairs for one in findings)}",
        spec=spread_spec(rows, axis=axis, mark=mark),
        numbers=_numbers(findings),
    )


def _row(one: ClaimFinding) -> Spread:
    claim, bound = one.claim, "at most " if one.bound else ""
    factor = _PERCENT.get(claim.measure, 1.0)
    here = "not measured" if one.ours is None else f"{bound}{figure(one.ours, claim.measure)}"
    held = one.ci95 and sorted(factor * bound for bound in one.ci95)
    return Spread(
        label=f"{claim.workload}, {claim.text}",
        figure=f"{here}: {one.answer}",
        colour=colour_of(claim.ours.writer),
        shape=shape_of(claim.ours.writer),
        middle=None if one.ours is None else factor * one.ours,
        bounds=(held[0], held[1]) if held else None,
        target=factor * claim.value,
    )


def _numbers(findings: Sequence[ClaimFinding]) -> Grid:
    columns = (("claim", False), ("claimed", True), ("here", True), ("interval", True))
    rows = []
    for one in findings:
        measure = one.claim.measure
        held = one.ci95 or ()
        rows.append(
            [
                f"{one.claim.workload}, {one.claim.text}",
                figure(one.claim.value, measure),
                "-" if one.ours is None else figure(one.ours, measure),
                " to ".join(figure(value, measure) for value in held) or "-",
            ]
        )
    return Grid(columns=columns, rows=rows)
