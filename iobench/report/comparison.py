"""The document of `iobench compare`: a ratio and a finding for each contender and operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from iobench.report.compare import ComparisonRow, RunComparison
from iobench.report.document import Chart, Document, Line, MarkLine, Section, Spread
from iobench.report.facts import commands_section, environment_section
from iobench.report.grid import Grid
from iobench.report.palette import colour_of, shape_of
from iobench.results import ResultFile
from iobench.results.setting import labels
from iobench.units import GIB, count_of

__all__ = ["compare_document", "notes"]

_MOST_NAMES = 4  # in a line of the answer
_STYLES = {"better": "green", "worse": "bold red"}


def compare_document(comparison: RunComparison, runs: Sequence[ResultFile] = ()) -> Document:
    """Return the document of a comparison of `runs`, the newest last; a page carries them."""
    last = [environment_section(runs[-1].run), commands_section(runs)] if runs else []
    return Document(
        kind="iobench compare",
        title=_title(comparison),
        about=(f"before: {', '.join(comparison.old)}", f"now: {', '.join(comparison.new)}"),
        answer=tuple(_answer(comparison)),
        tables=(_grid(comparison),) if comparison.rows else (),
        notes=tuple(notes(comparison)),
        data=comparison.document(),
        draw=partial(_sections, comparison),
        appendix=tuple(last),
        records=tuple(one.path for one in runs),
    )


def _answer(comparison: RunComparison) -> Iterator[Line]:
    """Yield how many rows have each finding, and which are better or worse if they are few."""
    found: dict[str, list[str]] = {}
    for label, row in _labelled(comparison):
        finding = "not judged" if row.finding is None else str(row.finding)
        found.setdefault(finding, []).append(f"{label} {row.operation} {row.ratio:.2f}x")
    for finding, who in found.items():
        which = f": {', '.join(who)}" if finding in _STYLES and len(who) <= _MOST_NAMES else ""
        yield Line(finding.capitalize(), (f"{len(who)} of {len(comparison.rows)}{which}",))
    if comparison.failed:
        yield Line("Failed", (", ".join(comparison.failed),))


def _grid(comparison: RunComparison) -> Grid:
    """Return the table of ratios. On a narrow terminal both rates go first, then the interval."""
    return Grid(
        columns=(
            *(("writer", False), ("operation", False)),
            *(("before\nGiB/s", True), ("now\nGiB/s", True), ("ratio", True)),
            *(("95%\ninterval", True), ("finding", False)),
        ),
        rows=[_cells(label, one) for label, one in _labelled(comparison)],
        drop=(2, 3, 5),
        styles=tuple(_STYLES.get(str(one.finding), "") for one in comparison.rows),
    )


def _cells(label: str, row: ComparisonRow) -> list[str]:
    ci = row.ci95
    return [
        label,
        row.operation,
        f"{row.old_bytes_per_s / GIB:.2f}",
        f"{row.new_bytes_per_s / GIB:.2f}",
        f"{row.ratio:.3f}",
        f"{ci[0]:.3f}-{ci[1]:.3f}" if ci else "-",
        _finding(row),
    ]


def _finding(row: ComparisonRow) -> str:
    if row.finding is None:
        return "not judged"
    return f"{row.finding} (regression)" if row.regression else str(row.finding)


def _labelled(comparison: RunComparison) -> Iterator[tuple[str, ComparisonRow]]:
    """Return each row with its label."""
    return zip(labels(one.setting for one in comparison.rows), comparison.rows, strict=True)


def notes(comparison: RunComparison) -> Iterator[str]:
    """Yield which runs are compared, by which floor, and what is known of single rows."""
    yield f"before: {', '.join(comparison.old)}"
    yield f"now: {', '.join(comparison.new)}"
    if comparison.one_run_a_side:
        yield (
            "one run a side: two runs of unchanged code differ by more than their samples do; "
            "compare OLD1 OLD2 -- NEW1 NEW2 measures by how much"
        )
    for who, ratio in comparison.controls.items():
        yield f"unchanged code: {who} moved by {ratio:.3f}, the floor of what moved the same way"
    for what in comparison.unlike:
        yield f"unlike runs, compared by force: {what}"
    rows_by_note: dict[str, list[str]] = {}
    for label, one in _labelled(comparison):
        for note in one.notes:
            rows_by_note.setdefault(note, []).append(f"{label} {one.operation}")
    for note, rows in rows_by_note.items():
        yield note if len(rows) == len(comparison.rows) > 1 else f"{note} [{', '.join(rows)}]"
    for who, why in comparison.failed.items():
        yield f"FAILED now: {who}: {why}"
    if comparison.missing:
        yield f"only before: {', '.join(comparison.missing)}"
    if comparison.added:
        yield f"only now: {', '.join(comparison.added)}"
    floors = sorted({one.floor for one in comparison.rows})
    if floors:
        shown = " to ".join(f"{100 * floor:.1f}%" for floor in {floors[0]: 0, floors[-1]: 0})
        records = dict.fromkeys(one.floor_record for one in comparison.rows if one.floor_record)
        by = f" (A/A in {', '.join(records)})" if records else ""
        yield (
            f"a difference is shown when the whole interval is beyond {shown}{by}; "
            f"a regression is worse by more than {100 * comparison.threshold:g}%"
        )
    if len(comparison.rows) > 1:
        yield "the intervals of all rows hold together in 95% of comparisons (Bonferroni)"


def _title(comparison: RunComparison) -> str:
    """Return the workload and the number of regressions: `llama7b: 1 regression`."""
    count, spoilt = len(comparison.regressions), len(comparison.spoilt)
    found = count_of(count, "regression") if count else "no regression shown"
    return f"{comparison.workload}: {found}" + (
        f", {spoilt} INVALID or FAILED now" if spoilt else ""
    )


def _sections(comparison: RunComparison) -> Iterator[Section]:
    operations = dict.fromkeys(row.operation for row in comparison.rows)
    charts = tuple(_chart(comparison, operation) for operation in operations)
    yield Section(heading="Ratios", charts=charts)


def _chart(comparison: RunComparison, operation: str) -> Chart:
    from iobench.report.charts.spread import spread_chart

    pairs = [(label, row) for label, row in _labelled(comparison) if row.operation == operation]
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
    floor = max(row.floor for _, row in pairs)
    return spread_chart(
        rows,
        name=f"ratio-{operation}",
        title=f"Rate of each {operation} now, compared with before",
        says=f"Rate now over the rate before, by {operation}",
        caption="Right of the dashed line: faster now. Bar: the 95% interval of the ratio. "
        f"Changes of up to {100 * floor:.1f}% are noise.",
        axis="rate now / rate before",
        mark=MarkLine(x=1.0, label="unchanged"),
    )
