"""The formats of a comparison: terminal table, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from iobench.report.compare import Comparison, ComparisonRow
from iobench.report.grid import Grid
from iobench.report.render import DocumentFormat, write_grids, write_json
from iobench.results.labels import labels
from iobench.units import GIB, count_of

__all__ = ["grid", "labelled", "notes", "title", "write"]

_STYLES = {"better": "green", "worse": "bold red"}


def write(comparison: Comparison, form: DocumentFormat, stream: TextIO) -> None:
    """Write `comparison`; Markdown is ready for a pull request, JSON is unrounded."""
    if form is DocumentFormat.JSON:
        write_json(comparison.document(), stream)
        return
    write_grids(form, [title(comparison)], [grid(comparison)], notes(comparison), stream)


def grid(comparison: Comparison) -> Grid:
    """Return the table of ratios. On a narrow terminal both rates go first, then the interval."""
    return Grid(
        columns=(
            *(("writer", False), ("operation", False)),
            *(("before\nGiB/s", True), ("now\nGiB/s", True), ("ratio", True)),
            *(("95%\ninterval", True), ("finding", False)),
        ),
        rows=[_cells(label, one) for label, one in labelled(comparison)],
        drop=(2, 3, 5),
        styles=tuple(_STYLES.get(str(one.finding), "") for one in comparison.rows),
    )


def _cells(label: str, row: ComparisonRow) -> list[str]:
    ci = row.ci95
    finding = "not judged" if row.finding is None else str(row.finding)
    return [
        label,
        row.operation,
        f"{row.old_bytes_per_s / GIB:.2f}",
        f"{row.new_bytes_per_s / GIB:.2f}",
        f"{row.ratio:.3f}",
        f"{ci[0]:.3f}-{ci[1]:.3f}" if ci else "-",
        f"{finding} (regression)" if row.regression else finding,
    ]


def labelled(comparison: Comparison) -> Iterator[tuple[str, ComparisonRow]]:
    """Return each row with its label."""
    return zip(labels(one.setting for one in comparison.rows), comparison.rows, strict=True)


def notes(comparison: Comparison) -> Iterator[str]:
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
    for label, one in labelled(comparison):
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


def title(comparison: Comparison) -> str:
    """Return the workload and the number of regressions: `llama7b: 1 regression`."""
    count, spoilt = len(comparison.regressions), len(comparison.spoilt)
    found = count_of(count, "regression") if count else "no regression shown"
    return f"{comparison.workload}: {found}" + (
        f", {spoilt} INVALID or FAILED now" if spoilt else ""
    )
