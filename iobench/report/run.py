"""The document of a record of `iobench run`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from iobench.report.answer import answer
from iobench.report.document import Details, Document, Section
from iobench.report.facts import environment_line, environment_section, repeat_section
from iobench.report.rows import Measured, moment
from iobench.report.summary import Report
from iobench.report.wording import grid, heading, latency_grid, notes, phases_grid
from iobench.results import ResultFile, to_plain

_NOTHING = "nothing was measured"
_VERDICTS = (
    "VALID: cold restores, durable saves, all bytes verified and seen by the device; SCALED: the "
    "same, with a smaller checkpoint than the model's"
)


def run_document(result: ResultFile) -> Document:
    """Return the document of one record."""
    one = Measured.of(result)
    document = report_document(one.report)
    return replace(
        document,
        about=(*document.about, f"measured {moment(result.run.started_at)}"),
        draw=partial(_charts, one),
        appendix=(environment_section(result.run), repeat_section(result)),
        records=(result.path,),
        incomplete=result.incomplete,
    )


def report_document(report: Report) -> Document:
    """Return the document of `report`, without what only the record has."""
    urgent, others = notes(report)
    more = (phases_grid(report.summaries), latency_grid(report.summaries))
    return Document(
        kind="iobench run",
        title=heading(report),
        about=(environment_line(report.environment),),
        answer=tuple(answer(report)),
        tables=(grid(report),) if report.summaries else (),
        notes=(*([] if report.summaries else [_NOTHING]), *urgent),
        details=Details(tables=tuple(one for one in more if one.rows), notes=(*others, _VERDICTS)),
        data=to_plain(report),
        rows="summaries",
    )


def _charts(one: Measured) -> Iterable[Section]:
    from iobench.report.charts.run import run_charts  # it loads altair

    return run_charts(one)
