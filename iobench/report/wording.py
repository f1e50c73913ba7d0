"""Words, tables and notes of the report of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from iobench.bench.judging.verdict import REPEATS, VerdictStatus
from iobench.report.ceiling import ABOVE_FIO, NO_JOB, Ceiling
from iobench.report.grid import Grid
from iobench.report.row import Summary, rank_lines, straggler_lines
from iobench.report.summary import Report
from iobench.report.winners import PROVED, RANKED
from iobench.results.setting import common_axes
from iobench.stats.estimates import ENOUGH_SAMPLES, confidence_of, interval_heading
from iobench.stats.over_time import OverTime, RateChange
from iobench.units import GIB, count_of, format_rate, format_seconds, format_size

__all__ = [
    "cells",
    "columns",
    "footnotes",
    "grid",
    "heading",
    "over_time_lines",
    "phases_grid",
    "urgent_notes",
    "verdict_style",
]

# Header, and whether its cells are figures. A narrow header may be broken at its line break.
_COLUMNS = {
    "writer": ("writer", False),
    "operation": ("operation", False),
    "bytes": ("bytes", True),
    "rate": ("GiB/s\n(GB/s)", True),
    "interval": ("95%\ninterval", True),
    "ceiling": ("of\nfio", True),
    "ratio": ("times\nbaseline", True),
    "first": ("first\ndone (s)", True),
    "last": ("last\ndone (s)", True),
    "cpu": ("CPU\ns/GiB", True),
    "memory": ("memory", True),
    "verdict": ("verdict", False),
}
_DROPPED_FIRST = (
    "bytes",
    "memory",
    "cpu",
    "first",
    "last",
    "ceiling",
    "interval",
    "ratio",
)

_STYLES = {
    VerdictStatus.VALID: "green",
    VerdictStatus.SCALED: "yellow",
    VerdictStatus.UNPROVED: "bold yellow",
    VerdictStatus.INVALID: "bold red",
    VerdictStatus.FAILED: "bold red",
}
_MISSING = "-"
_MOST_NAMES = 12  # in a line below the table


def heading(report: Report) -> str:
    """Return the workload as text: `llama7b, rank 0: 4.00 GiB of 25.10 GiB in 6 files`.

    The ranks of a launcher come before: `llama7b on 16 ranks of 2 nodes`. The axes that all rows
    share follow, because labels leave them out: `numjobs=4`.
    """
    workload = report.workload
    of = f" of {format_size(workload.full_bytes)}" if workload.scaled else ""
    files = count_of(workload.files, "file")
    name, world = workload.name, report.world
    if world is not None:
        name += f" on {count_of(world.size, 'rank')} of {count_of(world.nodes, 'node')}"
    what = f"{name}, rank {workload.rank}: {format_size(workload.bytes)}{of} in {files}"
    return ", ".join([what, *common_axes(one.setting for one in report.summaries)])


def grid(report: Report) -> Grid:
    """Return the table of figures with the columns of `columns`.

    The verdict, where it is shown, is the last column and sets its style.
    """
    shown = columns(report)
    interval = interval_heading(one.repetitions for one in report.summaries)
    headers = {**_COLUMNS, "interval": (interval, True)}
    if report.baseline is not None and "name" not in report.baseline:
        headers["ratio"] = (f"times\n{_baseline(report.baseline)}", True)
    rows = [cells(one) for one in report.summaries]
    return Grid(
        columns=tuple(headers[name] for name in shown),
        rows=[[row[name] for name in shown] for row in rows],
        drop=tuple(shown.index(name) for name in _DROPPED_FIRST if name in shown),
        styles=tuple(verdict_style(one.verdict) for one in report.summaries)
        if "verdict" in shown
        else (),
    )


def verdict_style(verdict: str) -> str:
    """Return the style of a verdict in the last cell of a row."""
    return _STYLES[VerdictStatus(verdict)]


def cells(summary: Summary) -> dict[str, str]:
    """Return the cells of one row by the name of their column."""
    middle, interval = summary.median_bytes_per_s, summary.ci95_bytes_per_s
    return {
        "writer": summary.label,
        "operation": summary.operation,
        "bytes": format_size(summary.bytes),
        "rate": f"{middle / GIB:.2f} ({middle / 1e9:.2f})",
        "interval": f"{interval[0] / GIB:.2f}-{interval[1] / GIB:.2f}" if interval else _MISSING,
        "ceiling": _MISSING if summary.of_ceiling is None else f"{100 * summary.of_ceiling:.0f}%",
        "ratio": _times(summary),
        "first": f"{summary.first_done_s:.2f}",
        "last": f"{summary.last_done_s:.2f}",
        "cpu": f"{summary.cpu_s_per_gib:.2f}",
        "memory": _memory(summary),
        "verdict": summary.verdict,
    }


def columns(report: Report) -> list[str]:
    """Return the names of the columns that the report fills, in order.

    Bytes appear only if rows differ in them, ratios only with a baseline. First and last done
    appear only with several processes. The verdict appears if rows differ in it or one cannot win.
    """
    rows = report.summaries
    verdicts = {one.verdict for one in rows}
    absent = {
        "bytes": len({format_size(one.bytes) for one in rows}) == 1,
        "interval": all(one.ci95_bytes_per_s is None for one in rows),
        "ceiling": all(one.of_ceiling is None for one in rows),
        "ratio": all(one.ratio is None for one in rows),
        "first": all(one.axes.numjobs == 1 for one in rows),
        "last": all(one.axes.numjobs == 1 for one in rows),
        "memory": all(one.memory is None or one.memory.total_bytes is None for one in rows),
        "verdict": len(verdicts) == 1 and verdicts <= set(PROVED),
    }
    return [name for name in _COLUMNS if not absent.get(name, False)]


def _memory(summary: Summary) -> str:
    total = summary.memory.total_bytes if summary.memory else None
    return _MISSING if total is None else format_size(total)


def phases_grid(summaries: Iterable[Summary]) -> Grid:
    """Return the table of the phases in seconds: `gather 0.310, write 3.204, sync 0.012`."""
    rows = [
        [
            one.label,
            one.operation,
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in one.phases_s.items()),
        ]
        for one in summaries
    ]
    columns = (("writer", False), ("operation", False), ("phases (s)", False))
    return Grid(title="phases", columns=columns, rows=rows, sentences=(2,))


def footnotes(report: Report) -> list[str]:
    """Return all notes: failures, winners, decisions, baseline, fio, intervals, reasons."""
    lines = (
        *(
            _failure_lines,
            _winner_lines,
            _over_time_lines,
            _straggler_lines,
            _rank_lines,
            _decision_lines,
        ),
        *(_baseline_line, _ceiling_lines, _interval_line, _memory_line, _reason_lines),
    )
    return [line for part in lines for line in part(report)]


def urgent_notes(report: Report) -> list[str]:
    """Return the footnotes for every reader: failures, also of fio, stragglers, bad rows.

    So are data that repeat, because storage may know them, and rates above that of fio.
    """
    bad = {
        reason for one in report.summaries if one.verdict not in PROVED for reason in one.reasons
    }
    fio = [
        _no_ceiling(of, one) for of, one in _ceilings(report) if one.reason not in (None, NO_JOB)
    ]
    late = _straggler_lines(report)
    urgent = (REPEATS, ABOVE_FIO)
    bad |= {text for one in report.summaries for text in one.reasons if text.startswith(urgent)}
    return [*_failure_lines(report), *fio, *late, *_reason_lines(report, bad)]


def _over_time_lines(report: Report) -> list[str]:
    return [line for one in report.summaries for line in over_time_lines(one)]


def _rank_lines(report: Report) -> list[str]:
    """Return the range of the ranks' rates in each row."""
    return [
        line
        for one in report.summaries
        if one.ranks is not None
        for line in rank_lines(f"{one.label} {one.operation}", one.samples, one.ranks)
    ]


def _straggler_lines(report: Report) -> list[str]:
    """Return the ranks that were late in each row, by host."""
    return [
        line
        for one in report.summaries
        if one.ranks is not None
        for line in straggler_lines(f"{one.label} {one.operation}", one.samples, one.ranks)
    ]


def _decision_lines(report: Report) -> list[str]:
    """Return the decisions: `hybrid save chose direct: large (192), buffered: tail (6)`."""
    return [
        f"{label} {one.operation} chose "
        + ", ".join(f"{decision} ({count})" for decision, count in one.decisions.items())
        for label, one in ((one.label, one) for one in report.summaries)
        if one.decisions
    ]


def _winner_lines(report: Report) -> list[str]:
    """Return the winners, or that no difference is shown, and noise floors measured by an A/A."""
    lines = []
    for one in report.winners:
        kind = one.operation, one.restore_as, one.target, one.background
        if one.equals:
            names = _some([one.fastest, *one.equals])
            lines.append(f"fastest {one.what}: no difference shown between {names}")
        elif sum(_kind(each) == kind for each in report.summaries) > 1:
            lines.append(f"fastest {one.what}: {one.fastest}")
        if one.by_aa is not None:
            lines.append(f"noise floor of {one.what}: {100 * one.floor:.1f}% by {one.by_aa}")
    return lines


def _kind(one: Summary) -> tuple[str, str | None, str | None, str | None]:
    return one.operation, one.axes.restore_as, one.axes.target, one.axes.background


def _times(summary: Summary) -> str:
    """Return the ratio and its interval: `6.21 (5.90-6.55)`."""
    if summary.ratio is None:
        return _MISSING
    if summary.ratio_ci95 is None:
        return f"{summary.ratio:.2f}"
    low, high = summary.ratio_ci95
    return f"{summary.ratio:.2f} ({low:.2f}-{high:.2f})"


def _failure_lines(report: Report) -> list[str]:
    return [
        f"failed: {one.setting.name} {one.operation} in repetition {one.repetition + 1}, and left "
        f"out from then on: {one.error}"
        for one in report.failures
    ]


def _baseline_line(report: Report) -> list[str]:
    if report.baseline is None or all(one.ratio is None for one in report.summaries):
        return []
    return [f"baseline: {_baseline(report.baseline)}; ratios are of pairs, each with its interval"]


def _baseline(given: Mapping[str, Any]) -> str:
    """Return the label in the plan's record, which may hold axes; the name without a label."""
    return str(given.get("label") or given["name"])


def _ceilings(report: Report) -> list[tuple[str, Ceiling]]:
    """Return `fio`, or `fio in TARGET` for each of several targets, with its figures."""
    if not report.ceilings:
        return [("fio", report.ceiling)]
    return [(f"fio in {target}", one) for target, one in report.ceilings.items()]


def _ceiling_lines(report: Report) -> list[str]:
    lines = []
    for of, ceiling in _ceilings(report):
        for operation, value, job in (
            ("save", ceiling.save_bytes_per_s, ceiling.save_job),
            ("restore", ceiling.restore_bytes_per_s, ceiling.restore_job),
        ):
            if value is not None and job is not None:
                lines.append(
                    f"{of}: {operation} {format_rate(value)} by {job.get('name', 'a job')}"
                )
        if ceiling.reason:
            lines.append(_no_ceiling(of, ceiling))
    return lines


def _no_ceiling(of: str, ceiling: Ceiling) -> str:
    return f"{of}: not measured ({ceiling.reason})"


def _interval_line(report: Report) -> list[str]:
    several = (one.repetitions for one in report.summaries if one.repetitions > 1)
    fewest = min(several, default=ENOUGH_SAMPLES)
    if fewest >= ENOUGH_SAMPLES:
        return []
    sure = f"{100 * confidence_of(fewest):.0f}%"
    return [f"interval: {fewest} samples can bound a median with {sure} confidence at most"]


def _memory_line(report: Report) -> list[str]:
    if not any(one.memory and one.memory.total_bytes is not None for one in report.summaries):
        return []
    return ["memory: the most that the operation took besides the tensors, with page cache"]


def _reason_lines(report: Report, only: Collection[str] | None = None) -> list[str]:
    """Return each reason once, or each of `only`, with its rows unless all rows have it."""
    rows: dict[str, list[str]] = {}
    for one in report.summaries:
        for reason in one.reasons:
            rows.setdefault(reason, []).append(f"{one.label} {one.operation}")
    return [
        reason if len(who) == len(report.summaries) else f"{reason} [{_some(who)}]"
        for reason, who in rows.items()
        if only is None or reason in only
    ]


def _some(names: list[str]) -> str:
    """Return all names, or the first ones and the number of the others."""
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def over_time_lines(one: Summary) -> Iterator[str]:
    """Yield lines about the saves of a contender; none where they do not follow each other, or
    where its figure does not count."""
    over_time = one.over_time
    if over_time is None or one.verdict not in RANKED:
        return
    whole = format_seconds(over_time.elapsed_s)
    if over_time.change is None:
        yield f"{one.label}: no change seen in {whole}, {format_rate(one.median_bytes_per_s)}"
    else:
        yield from _change(one.label, over_time.change)
    yield f"{_steady(over_time)}; saves took {100 * over_time.saving:.0f}% of {whole}"


def _change(label: str, change: RateChange) -> Iterator[str]:
    before, after = format_rate(change.before_bytes_per_s), format_rate(change.after_bytes_per_s)
    yield f"{label}: {before} for {format_seconds(change.at_s)}, then {after}"
    low, high = map(format_seconds, change.at_s_ci95)
    yield f"the change is between {low} and {high}, after {format_size(change.written_bytes)}"


def _steady(over_time: OverTime) -> str:
    rounds = f"rounds of {format_seconds(over_time.round_s)}"
    if over_time.range is None or over_time.slope is None:
        return f"not known to be steady: {over_time.rounds} of 5 {rounds}"
    moved = f"range {100 * over_time.range:.0f}%, drift {100 * over_time.slope:.0f}%"
    state = "steady" if over_time.steady else "not steady"
    return f"{state} in the last 5 {rounds} ({moved})"
