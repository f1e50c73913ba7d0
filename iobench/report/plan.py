"""The document of `iobench plan`: how often to save, and what every interval costs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from iobench.goodput.forecast import Forecast
from iobench.goodput.goodput import TrainingJob
from iobench.report.document import Document, Line, Section
from iobench.report.grid import MISSING, Column, Grid, span
from iobench.results import ResultFile
from iobench.stats.estimates import ENOUGH_SAMPLES, confidence_of
from iobench.units import duration_form, format_seconds

SCHEMA = "iobench.plan/2"

_BASELINE = "baseline"


def plan_document(
    forecasts: Sequence[Forecast],
    *,
    title: str,
    step_s: float | None = None,
    interval_s: float | None = None,
    notes: Sequence[str] = (),
    result: ResultFile | None = None,
) -> Document:
    """Return the document of a plan: forecasts by job size, the smallest job first.

    `step_s` is the time of a training step, and `interval_s` the interval that was asked for.
    `result` is the record that it used; None for times by hand. In JSON numbers are unrounded, and
    keys name their unit.
    """
    jobs = list(dict.fromkeys(one.job for one in forecasts))
    ends = [[one for one in forecasts if one.job == job] for job in {jobs[0]: 0, jobs[-1]: 0}]
    many = len(jobs) > 1
    names = ("Smallest job", "Largest job") if many else ("Answer",)
    answers = [
        (_sentence(own, step_s, many), *_given_interval(own, interval_s, many)) for own in ends
    ]
    command = shlex.join(("iobench", *sys.argv[1:]))
    return Document(
        kind="iobench plan",
        title=title,
        about=(_assumptions(jobs),),
        answer=tuple(map(Line, names, answers)),
        tables=(_grid(forecasts),),
        notes=(*notes, *_method(forecasts), *_warnings(forecasts)),
        data={
            "schema": SCHEMA,
            "title": title,
            "method": {"step_s": step_s, "interval_s": interval_s},
            "forecasts": [_data(one) for one in forecasts],
            "notes": list(notes),
        },
        rows="forecasts",
        appendix=(Section(heading="Repeat it", commands=(command,)),),
        records=(result.path,) if result else (),
    )


def _assumptions(jobs: Sequence[TrainingJob]) -> str:
    """Return the size of the job, its failures and its restart."""
    first = jobs[0]
    rate = f"{first.failures_per_1000_node_days:g} failures per 1000 node-days"
    restart = f"restart {format_seconds(first.restart_s)} and then the restore"
    if len(jobs) > 1:
        return f"{first.gpus_per_node} GPUs per node, {rate}; {restart}"
    size = f"{_nodes(first)}, {first.gpus:,} GPUs"
    return f"{size}, {rate}: one every {format_seconds(first.mtbf_s)}; {restart}"


def _sentence(forecasts: Sequence[Forecast], step_s: float | None, many: bool) -> str:
    """Return `Save every 1 h 53 min (1,750 steps of 3.87 s): 3.4% of the time is lost.`

    `forecasts` are of one job, of `many` or of one.
    """
    best = max(forecasts, key=lambda one: one.best.ettr)
    start = f"{_nodes(best.job)}: save" if many else "Save"
    steps = ""
    if step_s:
        steps = f" ({best.best.interval_s / step_s:,.0f} steps of {format_seconds(step_s)})"
    losses = [f"{_lost(best.best.ettr)} of the time is lost"]
    if len(forecasts) > 1:
        modes = len({one.candidate.mode for one in forecasts}) > 1
        names = {
            one: f"{one.candidate.name} {one.candidate.mode}" if modes else one.candidate.name
            for one in (best, *(one for one in forecasts if one.baseline))
        }
        losses[0] += f" with {names.pop(best)}"
        losses += [f"{_lost(one.best.ettr)} with {name}" for one, name in names.items()]
    return f"{start} every {format_seconds(best.best.interval_s)}{steps}: {', '.join(losses)}."


def _given_interval(
    forecasts: Sequence[Forecast], asked_s: float | None, many: bool
) -> Iterator[str]:
    """Yield `Every 30 min 0 s, as given: the time lost is 2.4% with odirect sync.`"""
    losses = [
        f"{_lost(one.given.ettr)} with {one.candidate.name} {one.candidate.mode}"
        + (f" (every {format_seconds(one.given.interval_s)} at best)" if one.given.raised else "")
        for one in forecasts
        if one.given is not None
    ]
    if losses:
        start = f"{_nodes(forecasts[0].job)}: every" if many else "Every"
        every = format_seconds(asked_s or 0.0)
        yield f"{start} {every}, as given: the time lost is {', '.join(losses)}."


def _nodes(job: TrainingJob) -> str:
    return f"{job.nodes:,} node{'s' * (job.nodes != 1)}"


def _lost(ettr: float) -> str:
    percent = 100 * (1 - ettr)
    return f"{percent:.1f}%" if percent >= 1 else f"{percent:.2g}%"


def _data(one: Forecast) -> dict[str, Any]:
    job, candidate = one.job, one.candidate
    return {
        "nodes": job.nodes,
        "gpus": job.gpus,
        "failures_per_1000_node_days": job.failures_per_1000_node_days,
        "mtbf_s": job.mtbf_s,
        "restart_s": job.restart_s,
        "writer": candidate.name,
        "mode": candidate.mode,
        "baseline": one.baseline,
        "costs": asdict(candidate.costs),
        "save_samples": candidate.save_samples,
        "restore_samples": candidate.restore_samples,
        "interval_s": one.best.interval_s,
        "interval_s_ci95": one.interval_s_interval,
        "interval_raised": one.best.raised,
        "ettr": one.best.ettr,
        "ettr_ci95": one.ettr_interval,
        "lost_work_per_failure_s": one.lost_work_s,
        "saved_per_month": one.saved
        and {
            "wall_s": one.saved.wall_s,
            "wall_s_ci95": one.saved.wall_s_interval,
            "gpu_hours": one.saved.wall_s / 3600 * job.gpus,
        },
        "given": one.given and asdict(one.given),
        "warnings": list(one.warnings),
    }


def _grid(forecasts: Sequence[Forecast]) -> Grid:
    """Return the table of forecasts. All durations of a column have one form."""
    many = len({one.job for one in forecasts}) > 1
    sure = f"{100 * confidence_of(_fewest_samples(forecasts)):.0f}%"
    saves = any(one.saved for one in forecasts)

    def time(name: str, value: Callable[[Forecast], float], drop: int = 0) -> Column[Forecast]:
        form = duration_form(map(value, forecasts))
        return Column(name, lambda one: form(value(one)), drop)

    form = duration_form(seconds for one in forecasts for seconds in _save_s(one))
    columns: tuple[Column[Forecast] | None, ...] = (
        Column("nodes", lambda one: f"{one.job.nodes:,}") if many else None,
        time("MTBF", lambda one: one.job.mtbf_s, 3) if many else None,
        Column("writer", lambda one: one.candidate.name, figure=False),
        Column("mode", lambda one: one.candidate.mode, 8, figure=False),
        Column("save", lambda one: " + ".join(map(form, _save_s(one))), 6),
        time("restore", lambda one: one.candidate.costs.restore_s, 4),
        time("best\ninterval", lambda one: one.best.interval_s),
        Column("ETTR", lambda one: f"{one.best.ettr:.4f}"),
        Column(
            f"{sure}\ninterval",
            lambda one: span(one.ettr_interval, "{:.4f}".format),
            7,
            optional=True,
        ),
        time("lost work\nper failure", lambda one: one.lost_work_s, 1),
        Column("GPU-hours\nsaved/month", _gpu_hours, 5) if saves else None,
    )
    return Grid.of(forecasts, columns)


def _save_s(one: Forecast) -> list[float]:
    costs = one.candidate.costs
    return [costs.blocking_s, *([costs.persist_s] if costs.asynchronous else [])]


def _gpu_hours(one: Forecast) -> str:
    """Return the hours of all GPUs, with an interval where it holds 0."""
    if one.saved is None:
        return _BASELINE if one.baseline else MISSING
    hours, held = one.job.gpus / 3600, one.saved.wall_s_interval
    text = f"{one.saved.wall_s * hours:,.0f}"
    if held is None or 0 not in held:
        return text
    return f"{text} ({held.low * hours:,.0f} to {held.high * hours:,.0f})"


def _method(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield how figures and intervals were computed, and the confidence that few samples reach."""
    yield (
        "interval: training time between two saves, by the exact equation for failures without "
        "memory; ETTR: exact for them"
    )
    if any(one.candidate.resampled for one in forecasts):
        fewest = _fewest_samples(forecasts)
        sure = f"{100 * confidence_of(fewest):.0f}%"
        few = f", which bound a median with {sure} at most" if fewest < ENOUGH_SAMPLES else ""
        yield f"{sure} interval: by medians of {fewest} or more resampled samples{few}"
    if any(one.saved for one in forecasts):
        yield "saved: wall clock of work that takes the baseline 30 days, each at its best interval"


def _fewest_samples(forecasts: Sequence[Forecast]) -> int:
    """Return the fewest samples behind an interval; ENOUGH_SAMPLES without an interval."""
    methods = [one.candidate for one in forecasts if one.candidate.resampled]
    counts = (min(one.save_samples, one.restore_samples) for one in methods)
    return min(counts, default=ENOUGH_SAMPLES)


def _warnings(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield each warning once, with the writers that it is for unless it is for all."""
    found: dict[str, list[Forecast]] = {}
    for one in forecasts:
        for text in one.warnings:
            found.setdefault(text, []).append(one)
    many = len({one.job for one in forecasts}) > 1
    for text, cases in found.items():
        who = ", ".join(f"{one.candidate.name} {one.candidate.mode}" for one in cases)
        if many:
            who = f"from {min(one.job.nodes for one in cases):,} nodes"
        yield f"warning: {text}" + (f" [{who}]" if many or len(cases) < len(forecasts) else "")
