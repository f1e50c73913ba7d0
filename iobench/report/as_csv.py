"""The report as comma-separated values: a header, then one line per summary."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from iobench.report.summary import Report, Summary
from iobench.results.setting import AXES_IF_SET, AXIS_NAMES


def _axis(name: str, _: Report, one: Summary) -> Any:
    return getattr(one.axes, name)


_COLUMNS: dict[str, Callable[[Report, Summary], Any]] = {
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


def write(report: Report, stream: TextIO) -> None:
    """Write one line per summary. Numbers are unrounded; a missing value is empty.

    Phases, paths and decisions become columns `phase.<name>_s`, `path.<name>` and
    `decision.<name>`. They are empty for a writer that lacks them. A run of several targets has the
    column `target`.
    """
    rows = [_row(report, summary) for summary in report.summaries]
    columns = dict.fromkeys([*_COLUMNS, *(column for row in rows for column in row)])
    unset = {name for name in AXES_IF_SET if not any(row[name] for row in rows)}
    shown = [name for name in columns if name not in unset]
    writer = csv.DictWriter(stream, shown, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def _row(report: Report, summary: Summary) -> dict[str, Any]:
    row = {name: value(report, summary) for name, value in _COLUMNS.items()}
    row |= {f"phase.{name}_s": seconds for name, seconds in summary.phases_s.items()}
    row |= {f"path.{name}": operations for name, operations in summary.paths.items()}
    return row | {f"decision.{name}": count for name, count in summary.decisions.items()}
