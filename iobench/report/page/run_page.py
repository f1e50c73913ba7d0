"""The page of one or several records of `iobench run`."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.report.answer import answer
from iobench.report.page.charts.rates import rates_chart
from iobench.report.page.environment import (
    environment_section,
    figures_section,
    repeat_section,
    verdicts_section,
)
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.rows import Group, Measured
from iobench.report.wording import environment_line, heading
from iobench.results import ResultFile

__all__ = ["run_page"]

_CAVEATS = ("Stopped", "Noise")
"""Subjects of the answer that say how far it can be trusted."""


def run_page(results: Sequence[ResultFile]) -> Page:
    """Return the page of the records, at least one."""
    (one,) = [Measured.of(result) for result in results]
    lines = answer(one.report)
    return Page(
        kind="iobench run",
        title=heading(one.report),
        about=(environment_line(one.report), one.result.run.started_at),
        answer=tuple(line for line in lines if line.subject not in _CAVEATS),
        caveats=tuple(line for line in lines if line.subject in _CAVEATS),
        sections=_sections(one),
        attachments=(Attachment.of(one.result.path),),
    )


def _sections(one: Measured) -> tuple[Section, ...]:
    return (
        Section(heading="Rates", charts=tuple(_rates(one, group) for group in one.groups)),
        figures_section(one.report),
        verdicts_section(one.report),
        environment_section(one.result.run),
        repeat_section(one.result.run),
    )


def _rates(one: Measured, group: Group) -> Chart:
    ceiling = one.report.ceiling if group.target is None else one.report.ceilings[group.target]
    return rates_chart(group, ceiling.of(group.operation))
