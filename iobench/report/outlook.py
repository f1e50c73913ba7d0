"""Outlook: the forecasts of `iobench plan`, and what they say in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from iobench.goodput.forecast import Forecast, Method
from iobench.goodput.job import TrainingJob
from iobench.units import format_seconds

__all__ = ["Outlook", "answers", "assumptions"]


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
