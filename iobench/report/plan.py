"""The document of `iobench plan`: how often to save, and what every interval costs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from iobench.bench.judging.verdict import Reason
from iobench.goodput.forecast import Forecast, Method
from iobench.goodput.job import TrainingJob
from iobench.report.document import Document, Line, Section
from iobench.report.grid import Grid
from iobench.results import ResultFile
from iobench.stats.estimates import ENOUGH_SAMPLES, Interval, confidence_of
from iobench.units import DurationForm, duration_form, format_seconds

__all__ = ["SCHEMA", "Outlook", "plan_document"]

SCHEMA = "iobench.plan/2"

_MISSING, _BASELINE = "-", "baseline"
_SURE = "95%"  # in headings: becomes the confidence that the samples reach
_WITH_INTERVAL = f"\n({_SURE} interval)"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Forecasts by job size, their method and notes."""

    title: str
    method: Method
    forecasts: tuple[Forecast, ...]
    notes: tuple[str, ...]

    @property
    def jobs(self) -> list[TrainingJob]:
        """The jobs of the forecasts, in the given order."""
        return list(dict.fromkeys(one.job for one in self.forecasts))


def plan_document(outlook: Outlook, result: ResultFile | None = None) -> Document:
    """Return the document of a plan. `result` is the record that it used; None for times by hand.

    In JSON numbers are unrounded, and keys name their unit.
    """
    found = list(answers(outlook))
    names = ("Answer",) if len(found) == 1 else ("Smallest job", "Largest job")
    command = shlex.join(("iobench", *sys.argv[1:]))
    return Document(
        kind="iobench plan",
        title=outlook.title,
        about=tuple(assumptions(outlook)),
        answer=tuple(Line(name, tuple(own)) for name, own in zip(names, found, strict=True)),
        tables=(_grid(outlook),),
        notes=(*outlook.notes, *_method(outlook), *_warnings(outlook.forecasts)),
        data={
            "schema": SCHEMA,
            "title": outlook.title,
            "method": asdict(outlook.method),
            "forecasts": [_data(one) for one in outlook.forecasts],
            "notes": list(outlook.notes),
        },
        draw=partial(_sections, outlook),
        appendix=(Section(heading="Repeat it", commands=(command,)),),
        records=(result.path,) if result else (),
    )


def _sections(outlook: Outlook) -> Iterator[Section]:
    from iobench.report.charts.ettr import interval_chart, nodes_chart

    jobs = outlook.jobs
    charts = [nodes_chart(outlook.forecasts, _grid(outlook))] if len(jobs) > 1 else []
    for number, job in enumerate(dict.fromkeys((jobs[0], jobs[-1])), 1):
        chosen = tuple(one for one in outlook.forecasts if one.job == job)
        numbers = _grid(replace(outlook, forecasts=chosen))
        charts.append(interval_chart(chosen, numbers, name=f"ettr-interval-{number}"))
    yield Section(heading="Time that trains", charts=tuple(charts))


def answers(outlook: Outlook) -> Iterator[list[str]]:
    """Yield how often to save and what is lost, for the smallest and the largest job."""
    jobs = outlook.jobs
    for job in dict.fromkeys((jobs[0], jobs[-1])):
        yield [_sentence(outlook, job), *_given_interval(outlook, job)]


def assumptions(outlook: Outlook) -> Iterator[str]:
    """Yield the size of the job, its failures and its restart."""
    first = outlook.jobs[0]
    rate = f"{first.failures_per_1000_node_days:g} failures per 1000 node-days"
    restart = f"restart {format_seconds(first.restart_s)} and then the restore"
    if len(outlook.jobs) == 1:
        size = f"{first.nodes:,} nodes, {first.gpus:,} GPUs"
        yield f"{size}, {rate}: one every {format_seconds(first.mtbf_s)}; {restart}"
    else:
        yield f"{first.gpus_per_node} GPUs per node, {rate}; {restart}"


def _sentence(outlook: Outlook, job: TrainingJob) -> str:
    """Return `Save every 1 h 53 min (1,750 steps of 3.87 s): 3.4% of the time is lost.`"""
    found = [one for one in outlook.forecasts if one.job == job]
    best, step_s = _best(outlook, job), outlook.method.step_s
    start = f"{job.nodes:,} nodes: save" if len(outlook.jobs) > 1 else "Save"
    steps = ""
    if step_s:
        steps = f" ({best.best.interval_s / step_s:,.0f} steps of {format_seconds(step_s)})"
    losses = [f"{_lost(best)} of the time is lost"]
    if len(found) > 1:
        modes = len({one.candidate.mode for one in found}) > 1
        names = {
            one: f"{one.candidate.name} {one.candidate.mode}" if modes else one.candidate.name
            for one in (best, *(one for one in found if one.baseline))
        }
        losses[0] += f" with {names.pop(best)}"
        losses += [f"{_lost(one)} with {name}" for one, name in names.items()]
    return f"{start} every {format_seconds(best.best.interval_s)}{steps}: {', '.join(losses)}."


def _given_interval(outlook: Outlook, job: TrainingJob) -> Iterator[str]:
    """Yield `Every 30 min 0 s, as given: the time lost is 2.4% with odirect sync.`"""
    asked_s = outlook.method.interval_s or 0.0
    losses = [
        f"{_percent(1 - one.given.ettr)} with {one.candidate.name} {one.candidate.mode}"
        + (f" (every {format_seconds(one.given.interval_s)} at best)" if one.given.raised else "")
        for one in outlook.forecasts
        if one.job == job and one.given is not None
    ]
    if losses:
        start = f"{job.nodes:,} nodes: every" if len(outlook.jobs) > 1 else "Every"
        yield f"{start} {format_seconds(asked_s)}, as given: the time lost is {', '.join(losses)}."


def _best(outlook: Outlook, job: TrainingJob) -> Forecast:
    found = [one for one in outlook.forecasts if one.job == job]
    return max(found, key=lambda one: one.best.ettr)


def _lost(one: Forecast) -> str:
    return _percent(1 - one.best.ettr)


def _percent(part: float) -> str:
    percent = 100 * part
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
            "gpu_hours": one.saved.gpu_hours,
            "gpu_hours_ci95": one.saved.gpu_hours_interval,
        },
        "given": one.given and asdict(one.given),
        "warnings": [str(reason) for reason in one.warnings],
    }


def _grid(outlook: Outlook) -> Grid:
    """Return the table of forecasts."""
    many = len(outlook.jobs) > 1
    cells = {}
    for column in (one for one in _COLUMNS if many in one.by_sizes):
        form = duration_form(value for one in outlook.forecasts for value in column.seconds(one))
        cells[column] = [column.cell(one, form) for one in outlook.forecasts]
    shown = [one for one, texts in cells.items() if not set(texts) <= {_MISSING, _BASELINE}]
    names = [column.name for column in shown]
    sure = f"{100 * confidence_of(_fewest_samples(outlook)):.0f}%"
    resampled = any(one.candidate.resampled for one in outlook.forecasts)
    headers = [
        (name if resampled else name.replace(_WITH_INTERVAL, "")).replace(_SURE, sure)
        for name in names
    ]
    return Grid(
        columns=tuple(zip(headers, (column.figure for column in shown), strict=True)),
        rows=[list(row) for row in zip(*(cells[column] for column in shown), strict=True)],
        drop=tuple(names.index(name) for name in _DROPPED_FIRST if name in names),
    )


def _save(one: Forecast, form: DurationForm) -> str:
    costs = one.candidate.costs
    blocking = form(costs.blocking_s)
    return blocking + (f" + {form(costs.persist_s)}" if costs.asynchronous else "")


def _save_s(one: Forecast) -> list[float]:
    costs = one.candidate.costs
    return [costs.blocking_s, *([costs.persist_s] if costs.asynchronous else [])]


def _spread(interval: Interval | None, scale: float, digits: int) -> str:
    if interval is None:
        return _MISSING
    to = "-" if interval.low >= 0 else " to "
    return f"{interval.low / scale:,.{digits}f}{to}{interval.high / scale:,.{digits}f}"


def _gpu_hours(one: Forecast) -> str:
    if one.saved is None:
        return _BASELINE if one.baseline else _MISSING
    spread = one.saved.gpu_hours_interval
    unsure = spread is not None and 0 in spread
    return f"{one.saved.gpu_hours:,.0f}" + (f" ({_spread(spread, 1, 0)})" if unsure else "")


def _hours(one: Forecast) -> str:
    if one.saved is None:
        return _MISSING
    spread = one.saved.wall_s_interval
    return f"{one.saved.wall_s / 3600:,.1f}" + (f" ({_spread(spread, 3600, 1)})" if spread else "")


@dataclass(frozen=True)
class _Column:
    name: str
    figure: bool
    cell: Callable[[Forecast, DurationForm], str]
    seconds: Callable[[Forecast], Sequence[float]] = lambda _: ()
    """The durations in a cell. All cells of a column share one form."""
    by_sizes: tuple[bool, ...] = (True, False)  # for several sizes of the job, and for one


def _times(
    name: str, value: Callable[[Forecast], float], by_sizes: tuple[bool, ...] = (True, False)
) -> _Column:
    """Return a column whose cells hold one duration each."""
    return _Column(
        name, True, lambda one, form: form(value(one)), lambda one: [value(one)], by_sizes
    )


_COLUMNS = (
    _Column("nodes", True, lambda one, _: f"{one.job.nodes:,}", by_sizes=(True,)),
    _times("MTBF", lambda one: one.job.mtbf_s, (True,)),
    _Column("writer", False, lambda one, _: one.candidate.name),
    _Column("mode", False, lambda one, _: one.candidate.mode),
    _Column("save", True, _save, _save_s),
    _times("restore", lambda one: one.candidate.costs.restore_s),
    _times("best\ninterval", lambda one: one.best.interval_s),
    _Column("ETTR", True, lambda one, _: f"{one.best.ettr:.4f}"),
    _Column(f"{_SURE}\ninterval", True, lambda one, _: _spread(one.ettr_interval, 1, 4)),
    _times("lost work\nper failure", lambda one: one.lost_work_s),
    _Column("GPU-hours\nsaved/month", True, lambda one, _: _gpu_hours(one)),
    _Column(f"hours saved/month{_WITH_INTERVAL}", True, lambda one, _: _hours(one)),
)
_DROPPED_FIRST = (
    *("lost work\nper failure", f"hours saved/month{_WITH_INTERVAL}", "MTBF"),
    *("restore", "GPU-hours\nsaved/month", "save", f"{_SURE}\ninterval", "mode"),
)


def _method(outlook: Outlook) -> Iterator[str]:
    yield (
        "interval: training time between two saves, by the exact equation for failures without "
        "memory; ETTR: exact for them"
    )
    yield from _resampling(outlook)
    if any(one.saved for one in outlook.forecasts):
        yield "saved: wall clock of work that takes the baseline 30 days, each at its best interval"
    if any(one.candidate.costs.slots > 1 for one in outlook.forecasts):
        yield "slots: the persist time must be that with as many saves in flight"


def _fewest_samples(outlook: Outlook) -> int:
    """Return the fewest samples behind an interval; ENOUGH_SAMPLES without an interval."""
    methods = [one.candidate for one in outlook.forecasts if one.candidate.resampled]
    counts = (min(one.save_samples, one.restore_samples) for one in methods)
    return min(counts, default=ENOUGH_SAMPLES)


def _resampling(outlook: Outlook) -> Iterator[str]:
    """Yield how the intervals were computed, and the confidence that few samples reach."""
    if any(one.candidate.resampled for one in outlook.forecasts):
        fewest = _fewest_samples(outlook)
        sure = f"{100 * confidence_of(fewest):.0f}%"
        few = f", which bound a median with {sure} at most" if fewest < ENOUGH_SAMPLES else ""
        yield f"{sure} interval: by medians of {fewest} or more resampled samples{few}"


def _warnings(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield each warning once, with the writers that it is for unless it is for all."""
    found: dict[str, list[tuple[Forecast, Reason]]] = {}
    for one in forecasts:
        for reason in one.warnings:
            found.setdefault(reason.text, []).append((one, reason))
    many = len({one.job for one in forecasts}) > 1
    for text, cases in found.items():
        if many:
            yield f"warning: {text} [from {min(one.job.nodes for one, _ in cases):,} nodes]"
            continue
        figures = dict.fromkeys(figure for _, reason in cases for figure in reason.measured)
        who = dict.fromkeys(f"{one.candidate.name} {one.candidate.mode}" for one, _ in cases)
        merged = Reason(text=text, measured=tuple(figures))
        whose = "" if len(who) == len(forecasts) else f" [{', '.join(who)}]"
        yield f"warning: {merged}{whose}"
