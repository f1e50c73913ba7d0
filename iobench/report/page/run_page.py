"""The page of one or several records of `iobench run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.report.answer import answer
from iobench.report.page.charts.in_order import in_order_chart
from iobench.report.page.charts.over_time import over_time_chart
from iobench.report.page.charts.phases import phases_chart
from iobench.report.page.charts.rates import highest, rates_chart
from iobench.report.page.environment import (
    environment_section,
    figures_section,
    repeat_section,
    verdicts_section,
)
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.rows import Group, Measured
from iobench.report.page.side_by_side import side_by_side_page
from iobench.report.wording import environment_line, heading
from iobench.results import ResultFile

__all__ = ["run_page"]

_CAVEATS = ("Stopped", "Noise")
"""Subjects of the answer that say how far it can be trusted."""


def run_page(results: Sequence[ResultFile]) -> Page:
    """Return the page of one record, or of several next to each other."""
    measured = [Measured.of(result) for result in results]
    if len(measured) > 1:
        return side_by_side_page(measured, [tuple(_sections(one)) for one in measured])
    (one,) = measured
    lines = answer(one.report)
    return Page(
        kind="iobench run",
        title=heading(one.report),
        about=(environment_line(one.report), f"measured {one.when}"),
        answer=tuple(line for line in lines if line.subject not in _CAVEATS),
        caveats=tuple(line for line in lines if line.subject in _CAVEATS),
        sections=tuple(_sections(one)),
        attachments=(Attachment.of(one.result.path),),
    )


def _sections(one: Measured) -> Iterator[Section]:
    over_time = (over_time_chart(group) for group in one.groups)
    charts = {
        "Rates": [_rates(one, group) for group in one.groups],
        "Where the time goes": [phases_chart(group) for group in one.groups],
        "Over time": [chart for chart in over_time if chart],
        "Drift": [in_order_chart(group, one.result.run.started_at) for group in one.groups],
    }
    for name, found in charts.items():
        if found:
            yield Section(heading=name, charts=tuple(found))
    yield figures_section(one.report)
    yield verdicts_section(one.report)
    yield environment_section(one.result.run)
    yield repeat_section(one.result.run)


def _rates(one: Measured, group: Group) -> Chart:
    ceiling = one.report.ceiling if group.target is None else one.report.ceilings[group.target]
    same = (other for other in one.groups if other.operation == group.operation and group.target)
    return rates_chart(
        group,
        ceiling.of(group.operation),
        headline=_headline(one, group),
        up_to_gib_per_s=max(map(highest, same), default=0.0),
    )


def _headline(one: Measured, group: Group) -> str:
    """Return the answer about a group, for its picture; empty in a run of several targets."""
    subject = group.name.capitalize()
    found = (line for line in answer(one.report) if line.subject == subject and not group.target)
    return next((f"{subject}: {line.texts[0]}" for line in found), "")
