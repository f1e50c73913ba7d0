"""The page of `iobench compare`: the ratio of each contender with its interval around 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.report.answer import Line
from iobench.report.compare import Comparison, ComparisonRow
from iobench.report.compare_as import grid, labelled, notes, title
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import MarkLine, Spread, spread_spec
from iobench.report.page.environment import environment_section
from iobench.report.page.page import Attachment, Chart, Page
from iobench.report.page.palette import colour_of, shape_of
from iobench.report.page.tables import charts_section, commands_section, tables_section
from iobench.results import ResultFile

__all__ = ["compare_page"]

_UNCHANGED = MarkLine(x=1.0, label="unchanged")


def compare_page(
    comparison: Comparison, before: Sequence[ResultFile], after: Sequence[ResultFile]
) -> Page:
    """Return the page of a comparison of the runs `before` and `after`, which it carries."""
    operations = dict.fromkeys(row.operation for row in comparison.rows)
    charts = (_chart(comparison, operation) for operation in operations)
    return Page(
        kind="iobench compare",
        title=title(comparison),
        about=(f"before: {', '.join(comparison.old)}", f"now: {', '.join(comparison.new)}"),
        answer=tuple(_answer(comparison)),
        sections=(
            *charts_section("Ratios", charts),
            tables_section([grid(comparison)], notes(comparison)),
            environment_section(after[-1].run),
            commands_section([*before, *after]),
        ),
        attachments=tuple(Attachment.of(one.path) for one in (*before, *after)),
    )


def _answer(comparison: Comparison) -> Iterator[Line]:
    """Yield the contenders by finding, which the terminal has in the last column."""
    found: dict[str, list[str]] = {}
    for label, row in labelled(comparison):
        found.setdefault(_finding(row), []).append(f"{label} {row.operation} {row.ratio:.2f}x")
    for finding, who in found.items():
        yield Line(finding.capitalize(), tuple(who))
    if comparison.failed:
        yield Line("Failed", tuple(comparison.failed))


def _finding(row: ComparisonRow) -> str:
    if row.finding is None:
        return "not judged"
    return f"{row.finding} (regression)" if row.regression else str(row.finding)


def _chart(comparison: Comparison, operation: str) -> Chart:
    pairs = [(label, row) for label, row in labelled(comparison) if row.operation == operation]
    pairs.sort(key=lambda pair: -pair[1].ratio)
    rows = [
        Spread(
            label=label,
            figure=f"{row.ratio:.2f}x, {_finding(row)}",
            colour=colour_of(row.writer),
            shape=shape_of(row.writer),
            middle=row.ratio,
            bounds=row.ci95,
        )
        for label, row in pairs
    ]
    spoken = "; ".join(f"{row.label} {row.figure}" for row in rows)
    floor = max(row.floor for _, row in pairs)
    return Chart(
        name=f"ratio-{operation}",
        title=f"Rate of each {operation} now, compared with before",
        alt=f"Rate now over the rate before, by {operation}: {spoken}.",
        caption=f"Right of the dashed line: faster now. Bar: the 95% interval of the ratio. "
        f"Changes of up to {100 * floor:.1f}% are noise.",
        spec=spread_spec(rows, axis="rate now / rate before", mark=_UNCHANGED),
        numbers=Grid(
            columns=(("writer", False), ("ratio", True), ("interval", True), ("finding", False)),
            rows=[
                [
                    label,
                    f"{row.ratio:.4f}",
                    f"{row.ci95[0]:.4f} to {row.ci95[1]:.4f}" if row.ci95 else "-",
                    _finding(row),
                ]
                for label, row in pairs
            ],
        ),
    )
