"""The document of a record of `iobench run`: its words, tables and notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from iobench.bench.judging.ceiling import ABOVE_FIO, NO_JOB, Ceiling
from iobench.bench.judging.ranks import STRAGGLER
from iobench.bench.judging.verdict import REPEATS, VerdictStatus
from iobench.report.answer import answer
from iobench.report.document import Details, Document, Section
from iobench.report.facts import environment_line, environment_section, moment, repeat_section
from iobench.report.grid import MISSING, Column, Grid, shown, span
from iobench.report.summary import Report, summarise
from iobench.report.winners import PROVED, Summary
from iobench.results import Operation, ResultFile, to_plain
from iobench.results.setting import common_axes
from iobench.stats.estimates import interval_heading
from iobench.units import count_of, format_rate, format_size, in_gib
from iobench.writers.transfer import LatencyFigures

_NOTHING = "nothing was measured"
_VERDICTS = (
    "VALID: cold restores, durable saves, all bytes verified and seen by the device; SCALED: the "
    "same, with a smaller checkpoint than the model's"
)
_STYLES = {
    VerdictStatus.VALID: "green",
    VerdictStatus.SCALED: "yellow",
    VerdictStatus.UNPROVED: "bold yellow",
    VerdictStatus.INVALID: "bold red",
    VerdictStatus.FAILED: "bold red",
}
_LATENCIES = {
    "write": "block write",
    "read": "block read",
    "batch sync": "sync of a batch",
    "upload": "part upload",
}
_WHO = (
    Column[Summary]("writer", lambda one: one.label, figure=False),
    Column[Summary]("operation", lambda one: one.operation, figure=False),
)
_OPERATIONS: tuple[Operation, ...] = ("save", "restore")
_MOST_NAMES = 12  # in a line below the table


def run_document(result: ResultFile) -> Document:
    """Return the document of one record."""
    document = report_document(summarise(result))
    return replace(
        document,
        about=(*document.about, f"measured {moment(result.run.started_at)}"),
        draw=partial(_charts, result),
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


def _charts(result: ResultFile) -> Iterable[Section]:
    from iobench.report.charts.run import run_charts  # it loads altair

    return run_charts(result)


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
    """Return the table of figures.

    Bytes appear only if rows differ in them, ratios only with a baseline. First and last done
    appear only with several processes. The verdict appears if rows differ in it or one cannot win;
    it is the last column and sets its style.
    """
    rows = report.summaries
    interval = interval_heading(one.repetitions for one in rows)
    of_target = report.baseline is not None and "name" not in report.baseline
    times = _baseline(report.baseline) if report.baseline and of_target else "baseline"
    sized = len({format_size(one.bytes) for one in rows}) > 1
    several = any(one.axes.numjobs != 1 for one in rows)
    verdicts = {one.verdict for one in rows}
    judged = len(verdicts) > 1 or not verdicts <= set(PROVED)
    first = Column[Summary]("first\ndone (s)", lambda one: f"{one.first_done_s:.2f}", 4)
    last = Column[Summary]("last\ndone (s)", lambda one: f"{one.last_done_s:.2f}", 5)
    columns: tuple[Column[Summary] | None, ...] = (
        *_WHO,
        Column("bytes", lambda one: format_size(one.bytes), 1) if sized else None,
        Column("GiB/s\n(GB/s)", _rate),
        Column(interval, lambda one: span(one.ci95_bytes_per_s, in_gib), 7, optional=True),
        Column("of\nfio", lambda one: shown(one.of_ceiling, "{:.0%}".format), 6, optional=True),
        Column(f"times\n{times}", _times, 8, optional=True),
        *((first, last) if several else ()),
        Column("CPU\ns/GiB", lambda one: f"{one.cpu_s_per_gib:.2f}", 3),
        Column("memory", _memory, 2, optional=True),
        Column("verdict", lambda one: one.verdict, figure=False) if judged else None,
    )
    styles = tuple(_STYLES[VerdictStatus(one.verdict)] for one in rows) if judged else ()
    return Grid.of(rows, columns, styles=styles)


def _rate(one: Summary) -> str:
    return f"{in_gib(one.median_bytes_per_s)} ({in_gib(one.median_bytes_per_s, 1e9)})"


def _memory(one: Summary) -> str:
    return shown(one.memory.total_bytes if one.memory else None, format_size)


def phases_grid(summaries: Iterable[Summary]) -> Grid:
    """Return the table of the phases in seconds: `gather 0.310, write 3.204, sync 0.012`."""
    phases = Column[Summary]("phases (s)", _phases, figure=False, sentence=True)
    return Grid.of(summaries, (*_WHO, phases), "phases")


def _phases(one: Summary) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in one.phases_s.items())


def latency_grid(summaries: Iterable[Summary]) -> Grid:
    """Return the table of latencies in milliseconds."""
    rows = [(one, name, found) for one in summaries for name, found in one.latencies.items()]
    columns: tuple[Column[tuple[Summary, str, LatencyFigures]], ...] = (
        Column("writer", lambda row: row[0].label, figure=False),
        Column("operation", lambda row: row[0].operation, figure=False),
        Column("latency of", lambda row: _LATENCIES.get(row[1], row[1]), figure=False),
        Column("operations", lambda row: f"{row[2].operations:,}", 2),
        Column("p50\n(ms)", lambda row: _ms(row[2].p50_s)),
        Column("p95\n(ms)", lambda row: _ms(row[2].p95_s), 1),
        Column("p99\n(ms)", lambda row: _ms(row[2].p99_s)),
        Column("p99.9\n(ms)", lambda row: _ms(row[2].p99_9_s)),
        Column("max\n(ms)", lambda row: _ms(row[2].max_s)),
    )
    return Grid.of(rows, columns, "latencies")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def notes(report: Report) -> tuple[list[str], list[str]]:
    """Return the notes for every reader, and the others.

    For every reader are failures, also of fio, stragglers, and the reasons of bad rows. So are data
    that repeat, because storage may know them, and rates above that of fio. The others are about
    ranks, decisions, the baseline, fio, memory and verdicts.
    """
    bad = {
        reason for one in report.summaries if one.verdict not in PROVED for reason in one.reasons
    }
    fio = [
        _no_ceiling(of, one) for of, one in _ceilings(report) if one.reason not in (None, NO_JOB)
    ]
    urgent = (REPEATS, ABOVE_FIO)
    bad |= {text for one in report.summaries for text in one.reasons if text.startswith(urgent)}
    first = [*_failure_lines(report), *fio, *_straggler_lines(report), *_reason_lines(report, bad)]
    parts = (
        *(_rank_lines, _decision_lines, _baseline_line, _ceiling_lines),
        *(_memory_line, _reason_lines),
    )
    return first, [line for part in parts for line in part(report) if line not in first]


def _rank_lines(report: Report) -> Iterator[str]:
    """Yield the range of the ranks' rates in each row; medians of its samples."""
    for one in report.summaries:
        if one.ranks is not None:
            ends = (
                f"{in_gib(rank.bytes_per_s)} GiB/s (rank {rank.rank}, host {rank.host})"
                for rank in (one.ranks.slowest, one.ranks.fastest)
            )
            yield (
                f"ranks of {one.label} {one.operation}: {' to '.join(ends)}, median "
                f"{in_gib(one.ranks.median_bytes_per_s)}; medians of {one.samples}"
            )


def _straggler_lines(report: Report) -> Iterator[str]:
    for one in report.summaries:
        by_host: dict[str, list[str]] = {}
        for late in one.ranks.stragglers if one.ranks else ():
            more = f", with {late.bytes:.3g}x the bytes" if late.bytes > STRAGGLER else ""
            by_host.setdefault(late.host, []).append(
                f"rank {late.rank} in {late.samples} of {one.samples}, up to {late.worst:.2f}x the "
                f"median{more}"
            )
        if by_host:
            hosts = "; ".join(f"host {host}: {', '.join(texts)}" for host, texts in by_host.items())
            yield f"stragglers of {one.label} {one.operation}: {hosts}"


def _decision_lines(report: Report) -> list[str]:
    """Return the decisions: `hybrid save chose direct: large (192), buffered: small (6)`."""
    return [
        f"{one.label} {one.operation} chose "
        + ", ".join(f"{decision} ({count})" for decision, count in one.decisions.items())
        for one in report.summaries
        if one.decisions
    ]


def _times(summary: Summary) -> str:
    """Return the ratio and its interval: `6.21 (5.90-6.55)`."""
    if summary.ratio is None:
        return MISSING
    held = span(summary.ratio_ci95, "{:.2f}".format)
    return f"{summary.ratio:.2f}" + (f" ({held})" if summary.ratio_ci95 else "")


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


def _ceiling_lines(report: Report) -> Iterator[str]:
    for of, ceiling in _ceilings(report):
        for operation in _OPERATIONS:
            if (rate := ceiling.of(operation)) is not None:
                by = ceiling.job_of(operation).get("name", "a job")
                yield f"{of}: {operation} {format_rate(rate)} by {by}"
        if ceiling.reason:
            yield _no_ceiling(of, ceiling)


def _no_ceiling(of: str, ceiling: Ceiling) -> str:
    return f"{of}: not measured ({ceiling.reason})"


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
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown
