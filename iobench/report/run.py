"""The document of a record of `iobench run`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from iobench.report.answer import answer
from iobench.report.document import Details, Document, Section, Values
from iobench.report.facts import environment_line, environment_section, repeat_section
from iobench.report.rows import Measured, moment
from iobench.report.summary import Report, summarise
from iobench.report.winners import Summary
from iobench.report.wording import footnotes, grid, heading, latency_grid, phases_grid, urgent_notes
from iobench.results import ResultFile, to_plain
from iobench.results.setting import AXES_IF_SET, AXIS_NAMES

_NOTHING = "nothing was measured"
_VERDICTS = (
    "VALID: cold restores, durable saves, all bytes verified and seen by the device; SCALED: the "
    "same, with a smaller checkpoint than the model's"
)


def run_document(result: ResultFile) -> Document:
    """Return the document of one record."""
    return report_document(summarise(result), result)


def report_document(report: Report, result: ResultFile | None = None) -> Document:
    """Return the document of `report`; its charts, facts and record are those of `result`."""
    urgent, notes = urgent_notes(report), footnotes(report)
    others = [note for note in notes if note not in urgent]
    more = (phases_grid(report.summaries), latency_grid(report.summaries))
    document = Document(
        kind="iobench run",
        title=heading(report),
        about=(environment_line(report.environment),),
        answer=tuple(answer(report)),
        tables=(grid(report),) if report.summaries else (),
        notes=(*([] if report.summaries else [_NOTHING]), *urgent),
        details=Details(tables=tuple(one for one in more if one.rows), notes=(*others, _VERDICTS)),
        data=to_plain(report),
        values=_values(report),
    )
    if result is None:
        return document
    return replace(
        document,
        about=(*document.about, f"measured {moment(result.run.started_at)}"),
        draw=partial(_charts, Measured(result=result, report=report)),
        appendix=(environment_section(result.run), repeat_section(result)),
        records=(result.path,),
        incomplete=result.incomplete,
    )


def _charts(one: Measured) -> Iterable[Section]:
    from iobench.report.charts.run import run_charts  # it loads altair

    return run_charts(one)


# Unrounded values for CSV.


def _axis(name: str, _: Report, one: Summary) -> Any:
    return getattr(one.axes, name)


_COLUMNS: Mapping[str, Callable[[Report, Summary], Any]] = {
    "workload": lambda report, _: report.workload.name,
    "rank": lambda report, _: report.workload.rank,
    "scaled": lambda report, _: report.workload.scaled,
    "writer": lambda _, one: one.writer,
    "options": lambda _, one: " ".join(f"{name}={value}" for name, value in one.options.items()),
    **{name: partial(_axis, name) for name in AXIS_NAMES},
    "operation": lambda _, one: one.operation,
    "samples": lambda _, one: one.samples,
    "bytes": lambda _, one: one.bytes,
    "median_bytes_per_s": lambda _, one: one.median_bytes_per_s,
    "ci95_low_bytes_per_s": lambda _, one: one.ci95_bytes_per_s and one.ci95_bytes_per_s[0],
    "ci95_high_bytes_per_s": lambda _, one: one.ci95_bytes_per_s and one.ci95_bytes_per_s[1],
    "of_ceiling": lambda _, one: one.of_ceiling,
    "ratio": lambda _, one: one.ratio,
    "ratio_ci95_low": lambda _, one: one.ratio_ci95 and one.ratio_ci95[0],
    "ratio_ci95_high": lambda _, one: one.ratio_ci95 and one.ratio_ci95[1],
    "cpu_s_per_gib": lambda _, one: one.cpu_s_per_gib,
    "process_memory_bytes": lambda _, one: one.memory and one.memory.process_bytes,
    "page_cache_bytes": lambda _, one: one.memory and one.memory.page_cache_bytes,
    "first_done_s": lambda _, one: one.first_done_s,
    "last_done_s": lambda _, one: one.last_done_s,
    "verdict": lambda _, one: one.verdict,
    "reasons": lambda _, one: "; ".join(one.reasons),
}


def _values(report: Report) -> Values:
    """Return a row per summary.

    Phases, paths and decisions become columns `phase.<name>_s`, `path.<name>` and
    `decision.<name>`. They are empty for a writer that lacks them. A run of several targets has the
    column `target`, and one over time the columns `over_time.<name>`.
    """
    rows = [_row(report, summary) for summary in report.summaries]
    columns = dict.fromkeys([*_COLUMNS, *(column for row in rows for column in row)])
    unset = {name for name in AXES_IF_SET if not any(row[name] for row in rows)}
    return Values(columns=[name for name in columns if name not in unset], rows=rows)


def _row(report: Report, summary: Summary) -> dict[str, Any]:
    row = {name: value(report, summary) for name, value in _COLUMNS.items()}
    row |= {f"phase.{name}_s": seconds for name, seconds in summary.phases_s.items()}
    row |= {f"path.{name}": operations for name, operations in summary.paths.items()}
    if lasted := summary.over_time:
        change = lasted.change
        row |= {
            "over_time.steady": lasted.steady,
            "over_time.change_at_s": change and change.at_s,
            "over_time.before_bytes_per_s": change and change.before_bytes_per_s,
            "over_time.after_bytes_per_s": change and change.after_bytes_per_s,
        }
    return row | {f"decision.{name}": count for name, count in summary.decisions.items()}
