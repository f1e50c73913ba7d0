"""The page of `iobench plan`: how often to save, and what every interval costs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from iobench.report.answer import Line
from iobench.report.forecast import footnotes, grids
from iobench.report.outlook import Outlook, answers, assumptions
from iobench.report.page.charts.ettr import interval_chart, nodes_chart
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.tables import tables_section
from iobench.results import ResultFile

__all__ = ["plan_page"]


def plan_page(outlook: Outlook, result: ResultFile | None) -> Page:
    """Return the page of a plan. `result` is the record that it used; None for times by hand."""
    return Page(
        kind="iobench plan",
        title=outlook.title,
        about=tuple(assumptions(outlook)),
        answer=tuple(_answer(outlook)),
        sections=(
            Section(heading="Time that trains", charts=tuple(_charts(outlook))),
            tables_section(grids(outlook), footnotes(outlook)),
            Section(heading="Repeat it", commands=(shlex.join(("iobench", *sys.argv[1:])),)),
        ),
        attachments=(Attachment.of(result.path),) if result else (),
    )


def _answer(outlook: Outlook) -> Iterator[Line]:
    found = list(answers(outlook))
    names = ("Answer",) if len(found) == 1 else ("Smallest job", "Largest job")
    for name, texts in zip(names, found, strict=True):
        yield Line(name, tuple(texts))


def _charts(outlook: Outlook) -> Iterator[Chart]:
    jobs = outlook.jobs
    if len(jobs) > 1:
        yield nodes_chart(outlook.forecasts)
    for number, job in enumerate(dict.fromkeys((jobs[0], jobs[-1]))):
        chosen = [one for one in outlook.forecasts if one.job == job]
        yield interval_chart(chosen, name=f"ettr-interval-{number + 1}")
