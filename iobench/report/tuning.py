"""The result of `iobench autotune` as a terminal table or JSON (`iobench.tuning/1`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from iobench.bench.judging.comparison import Difference
from iobench.bench.judging.stats import bounds, interval_heading
from iobench.report.grid import Grid, write_grids_as_table
from iobench.report.render import write_json
from iobench.results.codec import to_plain
from iobench.tune.emit import machine_words, storage_words
from iobench.tune.journal import TuningRecord
from iobench.tune.outcome import Outcome, Standing
from iobench.tune.tuning import Tuning
from iobench.units import format_seconds, format_size

__all__ = ["SCHEMA", "grid", "notes", "write_document", "write_table"]

SCHEMA = "iobench.tuning/1"

_NOTHING = "-"
_DROPPED_FIRST = (6, 7, 8, 5, 3)  # CPU, memory, samples, both intervals


def write_table(outcome: Outcome, tuning: Tuning, header: TuningRecord, stream: TextIO) -> None:
    """Write heading, the confirmed settings, and the notes of `notes`."""
    size = tuning.actual_bytes(outcome.size_bytes)
    heading = (
        f"{tuning.workload.name}, rank {tuning.asked.rank}: the best setting for "
        f"{outcome.objective.goal}, confirmed with {format_size(size)} of "
        f"{format_size(tuning.full_bytes)}",
        f"{machine_words(header)}, {storage_words(header)}",
    )
    write_grids_as_table(heading, [grid(outcome, size)], notes(outcome), stream)


def grid(outcome: Outcome, size_bytes: int) -> Grid:
    """Return the table of the confirmed settings. `size_bytes` is that of a checkpoint."""
    goal, standings = outcome.objective.goal, outcome.standings()
    pairs = [one.over_baseline.ratio.samples for one in standings if one.over_baseline]
    columns = (
        ("setting", False),
        ("", False),
        ("stall" if goal == "stall" else "GiB/s\n(GB/s)", True),
        (interval_heading(one.samples for one in standings), True),
        (f"times\n{outcome.baseline or 'baseline'}", True),
        (interval_heading(pairs), True),
        ("CPU\ns/GiB", True),
        ("memory", True),
        ("samples", True),
        ("verdict", False),
    )
    rows = [_row(one, outcome, size_bytes) for one in standings]
    return Grid(columns=columns, rows=rows, drop=_DROPPED_FIRST)


def write_document(outcome: Outcome, tuning: Tuning, header: TuningRecord, stream: TextIO) -> None:
    """Write one document and a newline. Numbers are unrounded; each key names its unit."""
    verdict = outcome.verdict
    document = {
        "schema": SCHEMA,
        "asked": to_plain(tuning.asked),
        "chosen": outcome.chosen.label,
        "baseline": outcome.baseline,
        "runner_up": outcome.runner_up,
        "equals": list(verdict.equals),
        "refuted": verdict.refuted,
        "size_bytes": tuning.actual_bytes(outcome.size_bytes),
        "confirmed": [_document(one) for one in outcome.standings()],
        "reasons": list(outcome.reasons()),
        "space": {
            "settings": outcome.space.size,
            "writers": sorted(outcome.space.dimensions),
            "left_out": list(outcome.space.left_out),
        },
        "tried": [
            {
                "setting": name,
                "origin": trial.candidate.origin,
                "status": trial.status.value,
                "cause": trial.cause,
                "rounds": len(trial.losses),
                "losses": list(trial.losses.values()),
            }
            for name, trial in outcome.trials.items()
        ],
        "spent_s": outcome.budget.spent_s,
        "written_bytes": outcome.budget.written_bytes,
        "environment": {"machine": to_plain(header.machine), "storage": to_plain(header.storage)},
    }
    write_json(document, stream)


def notes(outcome: Outcome) -> Iterator[str]:
    """Yield how sure the choice is, and the outcome of settings that are not in the table."""
    yield from outcome.reasons()
    chosen, *_ = outcome.standings()
    if chosen.paths:
        yield f"its bytes went {' and '.join(chosen.paths)}"
    if chosen.verdict:
        yield from (f"{chosen.candidate.label}: {reason}" for reason in chosen.verdict.reasons)
    counts = ", ".join(f"{count} {status}" for status, count in outcome.counts().items())
    yield (
        f"{len(outcome.trials)} of {outcome.space.size} settings tried in "
        f"{format_seconds(outcome.budget.spent_s)}, "
        f"{format_size(outcome.budget.written_bytes)} written: {counts}"
    )
    for name, cause in outcome.failures().items():
        yield f"{name}: {cause}"
    for line in outcome.space.left_out:
        yield f"left out: {line}"


def _row(one: Standing, outcome: Outcome, size: int) -> list[str]:
    show, interval = outcome.objective.show, one.interval
    over = one.over_baseline
    return [
        one.candidate.label,
        _role(one, outcome),
        _short(show(one.loss, size)),
        f"{_short(show(interval.high, size), True)}-{_short(show(interval.low, size), True)}"
        if interval
        else _NOTHING,
        f"{over.ratio.ratio:.2f}" if over else _NOTHING,
        _interval(over),
        f"{one.cpu_s_per_gib:.2f}" if one.cpu_s_per_gib is not None else _NOTHING,
        format_size(one.memory_bytes) if one.memory_bytes is not None else _NOTHING,
        str(one.samples),
        one.verdict.status.value if one.verdict else _NOTHING,
    ]


def _role(one: Standing, outcome: Outcome) -> str:
    label = one.candidate.label
    roles = []
    if label == outcome.verdict.chosen:
        roles.append("chosen")
    if label == outcome.runner_up:
        roles.append("runner-up")
    if label == outcome.baseline:
        roles.append("baseline")
    elif one.candidate.well_known:
        roles.append("known good")
    return ", ".join(roles)


def _short(figure: str, bare: bool = False) -> str:
    """Return `2.31 (2.48)` for `2.31 GiB/s (2.48 GB/s)`; `bare` drops the part in brackets."""
    text = figure.partition(" per ")[0]
    text = text.replace(" GiB/s", "").replace(" GB/s", "")
    return text.partition(" (")[0] if bare else text


def _interval(difference: Difference | None) -> str:
    if difference is None or difference.ratio.interval is None:
        return _NOTHING
    interval = difference.ratio.interval
    return f"{interval.low:.2f}-{interval.high:.2f}"


def _document(one: Standing) -> dict[str, Any]:
    over = one.over_baseline
    return {
        "setting": one.candidate.label,
        "writer": one.candidate.writer,
        "options": to_plain(one.candidate.options.to_dict()),
        "origin": one.candidate.origin,
        "samples": one.samples,
        "loss": one.loss,
        "loss_ci95": bounds(one.interval),
        "ratio": over.ratio.ratio if over else None,
        "ratio_ci95": bounds(over.ratio.interval) if over else None,
        "finding": over.finding.value if over else None,
        "cpu_s_per_gib": one.cpu_s_per_gib,
        "memory_bytes": one.memory_bytes,
        "paths": list(one.paths),
        "verdict": one.verdict.status.value if one.verdict else None,
        "verdict_reasons": [str(reason) for reason in one.verdict.reasons] if one.verdict else [],
        "save_s": one.save_s,
        "restore_s": one.restore_s,
    }
