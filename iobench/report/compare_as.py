"""The formats of a comparison: terminal table, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from iobench.report.compare import Comparison, ComparisonRow

__all__ = ["CompareFormat", "write"]

_HEADERS = ("writer", "operation", "before GiB/s", "now GiB/s", "ratio", "95 % interval", "finding")
_FIGURES = range(2, 6)
_STYLES = {"better": "green", "worse": "bold red"}
_NO_TERMINAL_WIDTH = 1000


class CompareFormat(StrEnum):
    """The choices of `iobench compare --format`."""

    TABLE = "table"
    MD = "md"
    JSON = "json"


def write(comparison: Comparison, form: CompareFormat, stream: TextIO) -> None:
    """Write `comparison`; Markdown is ready for a pull request, JSON is unrounded."""
    if form is CompareFormat.JSON:
        json.dump(comparison.document(), stream, indent=2, allow_nan=False)
        stream.write("\n")
    elif form is CompareFormat.MD:
        stream.writelines(f"{line}\n" for line in _markdown(comparison))
    else:
        _table(comparison, stream)


def _cells(label: str, row: ComparisonRow) -> list[str]:
    from iobench.units import GIB

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


def _labelled(comparison: Comparison) -> Iterator[tuple[str, ComparisonRow]]:
    from iobench.results.labels import labels

    return zip(labels(one.setting for one in comparison.rows), comparison.rows, strict=True)


def _notes(comparison: Comparison) -> Iterator[str]:
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
    for label, one in _labelled(comparison):
        for note in one.notes:
            yield f"{note} [{label} {one.operation}]"
    for who, why in comparison.failed.items():
        yield f"FAILED now: {who}: {why}"
    if comparison.missing:
        yield f"only before: {', '.join(comparison.missing)}"
    if comparison.added:
        yield f"only now: {', '.join(comparison.added)}"
    floors = sorted({one.floor for one in comparison.rows})
    if floors:
        what = "the whole interval" if comparison.one_run_a_side else "the ratio of the runs"
        shown = " to ".join(f"{100 * floor:.1f} %" for floor in {floors[0]: 0, floors[-1]: 0})
        yield (
            f"a difference is shown when {what} is beyond {shown}; "
            f"a regression is worse by more than {100 * comparison.threshold:g} %"
        )


def _markdown(comparison: Comparison) -> Iterator[str]:
    from iobench.report.markdown import escape, row

    count, spoilt = len(comparison.regressions), len(comparison.spoilt)
    title = f"{count} regression{'s' * (count != 1)}" if count else "no regression"
    title += f", {spoilt} INVALID or FAILED now" if spoilt else ""
    yield f"**{escape(comparison.workload)}: {title}**"
    yield ""
    yield row(_HEADERS)
    yield row("---:" if i in _FIGURES else "---" for i in range(len(_HEADERS)))
    for label, one in _labelled(comparison):
        yield row(_cells(label, one))
    yield ""
    for note in _notes(comparison):
        yield f"- {escape(note)}"


def _table(comparison: Comparison, stream: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = None if stream.isatty() else _NO_TERMINAL_WIDTH
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for i, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if i in _FIGURES else "left", overflow="fold")
    for label, one in _labelled(comparison):
        cells = [Text(cell) for cell in _cells(label, one)]
        cells[-1].stylize(_STYLES.get(str(one.finding), ""))
        table.add_row(*cells)
    with console.capture() as captured:
        console.print(comparison.workload, style="bold")
        console.print()
        console.print(table)
        console.print()
        for note in _notes(comparison):
            console.print(note, soft_wrap=width is not None)
    stream.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
