"""The words and figures that people read, shared by the terminal table and Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iobench.report.summary import Report, Summary
from iobench.results.labels import common_axes, labels
from iobench.units import GIB, format_rate, format_size

__all__ = [
    "COLUMNS",
    "cells",
    "columns",
    "environment_line",
    "footnotes",
    "heading",
    "labels_of",
    "phases",
]

# Header and whether its cells are figures; a line break is where a narrow header may be broken.
COLUMNS = (
    ("writer", False),
    ("operation", False),
    ("bytes", True),
    ("GiB/s\n(GB/s)", True),
    ("95 %\ninterval", True),
    ("of\nceiling", True),
    ("times\nbaseline", True),
    ("first\ndone (s)", True),
    ("last\ndone (s)", True),
    ("CPU\ns/GiB", True),
    ("phases (s)", False),
    ("verdict", False),
)

_MISSING = "-"
_FEW_SAMPLES = 6
_MOST_NAMES = 12  # in a line below the table


def heading(report: Report) -> str:
    """What was replayed: `llama7b, rank 0: 4.00 GiB of 25.10 GiB in 6 files`.

    The axes follow in which all rows are alike, and which no row can name: `numjobs=4`.
    """
    workload = report.workload
    of = f" of {format_size(workload.full_bytes)}" if workload.scaled else ""
    files = "1 file" if workload.files == 1 else f"{workload.files} files"
    what = f"{workload.name}, rank {workload.rank}: {format_size(workload.bytes)}{of} in {files}"
    return ", ".join([what, *common_axes(one.setting for one in report.summaries)])


def cells(label: str, summary: Summary) -> list[str]:
    """One row, in the order of COLUMNS."""
    middle, interval = summary.median_bytes_per_s, summary.ci95_bytes_per_s
    return [
        label,
        summary.operation,
        format_size(summary.bytes),
        f"{middle / GIB:.2f} ({middle / 1e9:.2f})",
        f"{interval[0] / GIB:.2f}-{interval[1] / GIB:.2f}" if interval else _MISSING,
        f"{100 * summary.of_ceiling:.1f} %" if summary.of_ceiling is not None else _MISSING,
        _times(summary),
        f"{summary.first_done_s:.2f}",
        f"{summary.last_done_s:.2f}",
        f"{summary.cpu_s_per_gib:.2f}",
        phases(summary),
        summary.verdict,
    ]


def labels_of(report: Report) -> list[str]:
    """What to call each row."""
    return labels(one.setting for one in report.summaries)


def columns(report: Report) -> list[int]:
    """Which of COLUMNS the report fills.

    Ratios only where there is a baseline, first and last done only where processes differ in it.
    """
    empty = []
    if all(one.ratio is None for one in report.summaries):
        empty.append("times")
    if all(one.axes.numjobs == 1 for one in report.summaries):
        empty += ["first", "last"]
    return [i for i, (name, _) in enumerate(COLUMNS) if name.split()[0] not in empty]


def phases(summary: Summary) -> str:
    """`gather 0.310, write 3.204, sync 0.012`, in seconds."""
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in summary.phases_s.items())


def footnotes(report: Report) -> list[str]:
    """Below the table: failures, decisions, baseline, ceiling, intervals, reasons."""
    lines = (
        *(_failure_lines, _winner_lines, _decision_lines, _baseline_line, _ceiling_lines),
        *(_interval_line, _reason_lines),
    )
    return [line for part in lines for line in part(report)]


def environment_line(report: Report) -> str:
    """Host, kernel, CPU, memory, GPUs and storage in one line; what is not known is left out."""
    machine, storage = report.environment.machine, report.environment.storage
    cpu, memory = _part(machine, "cpu"), _part(machine, "memory")
    device = _part(storage, "device")
    gpus = [str(gpu.get("name", "GPU")) for gpu in _list(machine, "gpus")]
    total = memory.get("total_bytes")
    cpus = cpu.get("usable_cpus")
    facts = [
        machine.get("hostname"),
        f"Linux {machine['kernel']}" if machine.get("kernel") else None,
        cpu.get("model"),
        f"{cpus} CPUs" if cpus else None,
        f"{format_size(total)} memory" if isinstance(total, int) else None,
        *(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)),
        storage.get("fs_type") or storage.get("kind"),
        device.get("model") or device.get("name"),
    ]
    return ", ".join(str(fact) for fact in facts if fact) or "machine not known"


def _decision_lines(report: Report) -> list[str]:
    """For a writer that chooses: `hybrid save chose direct: large (192), buffered: tail (6)`."""
    return [
        f"{label} {one.operation} chose "
        + ", ".join(f"{decision} ({count})" for decision, count in one.decisions.items())
        for label, one in zip(labels_of(report), report.summaries, strict=True)
        if one.decisions
    ]


def _winner_lines(report: Report) -> list[str]:
    """Who won, if a difference is shown; the noise floor where an A/A measured it."""
    names = labels_of(report)
    lines = []
    for one in report.winners:
        kind = one.operation, one.restore_as
        what = " ".join(part for part in kind if part)
        if one.equals:
            who = _some([names[position] for position in (one.fastest, *one.equals)])
            lines.append(f"fastest {what}: no difference shown between {who}")
        elif sum((each.operation, each.axes.restore_as) == kind for each in report.summaries) > 1:
            lines.append(f"fastest {what}: {names[one.fastest]}")
        if one.measured:
            lines.append(f"noise floor of {what}: {100 * one.floor:.1f} % by A/A")
    return lines


def _times(summary: Summary) -> str:
    """`6.21 (5.90-6.55)`: the ratio and its 95 % interval."""
    if summary.ratio is None:
        return _MISSING
    if summary.ratio_ci95 is None:
        return f"{summary.ratio:.2f}"
    low, high = summary.ratio_ci95
    return f"{summary.ratio:.2f} ({low:.2f}-{high:.2f})"


def _failure_lines(report: Report) -> list[str]:
    return [
        f"failed: {one.setting.name} {one.operation} in repetition {one.repetition}, and left out "
        f"from then on: {one.error}"
        for one in report.failures
    ]


def _baseline_line(report: Report) -> list[str]:
    if report.baseline is None or all(one.ratio is None for one in report.summaries):
        return []
    return [f"baseline: {_baseline(report.baseline)}; ratios are of pairs, with 95 % intervals"]


def _baseline(given: Mapping[str, Any]) -> str:
    """Its name as the plan's record has it, with the axes where it was one of several."""
    return str(given.get("label") or given["name"])


def _ceiling_lines(report: Report) -> list[str]:
    ceiling = report.ceiling
    lines = [
        f"ceiling: {operation} {format_rate(value)} by fio {job.get('name', 'job')}"
        for operation, value, job in (
            ("save", ceiling.save_bytes_per_s, ceiling.save_job),
            ("restore", ceiling.restore_bytes_per_s, ceiling.restore_job),
        )
        if value is not None and job is not None
    ]
    if ceiling.reason:
        lines.append(f"ceiling: not measured ({ceiling.reason})")
    return lines


def _interval_line(report: Report) -> list[str]:
    counts = [one.samples for one in report.summaries if one.samples > 1]
    fewest = min(counts, default=_FEW_SAMPLES)
    if fewest >= _FEW_SAMPLES:
        return []
    sure = 100 * (1 - 2.0 ** (1 - fewest))
    return [f"interval: {fewest} samples can bound a median with {sure:.0f} % confidence at most"]


def _reason_lines(report: Report) -> list[str]:
    """Each reason once, with the rows that have it unless all do."""
    rows: dict[str, list[str]] = {}
    for label, one in zip(labels_of(report), report.summaries, strict=True):
        for reason in one.reasons:
            rows.setdefault(reason, []).append(f"{label} {one.operation}")
    return [
        reason if len(who) == len(report.summaries) else f"{reason} [{_some(who)}]"
        for reason, who in rows.items()
    ]


def _some(names: list[str]) -> str:
    """All of them, or the first ones and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The mappings in the list `name`; none where there is no such list."""
    given = values.get(name)
    return [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
