"""Forecast: best interval, ETTR, lost work and saved time of a job with one way to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from iobench.goodput import goodput
from iobench.goodput.goodput import MONTH_S, Costs, TrainingJob
from iobench.goodput.measured import SavingMethod
from iobench.stats.estimates import CONFIDENCE, Interval


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An interval and its exact ETTR.

    `raised` is true where a shorter interval was wanted, at which saves wait for each other.
    """

    interval_s: float
    raised: bool
    ettr: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Time that the same work takes less than with the baseline, per 30 days of the baseline."""

    wall_s: float
    wall_s_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One candidate in one job. `best` maximises ETTR; `given` has the user's own interval.

    Intervals hold 95% of the values from resampled medians; None without samples. `saved` is None
    for the baseline, and where no work gets done. `lost_work_s` is per failure of the running job.
    """

    candidate: SavingMethod
    job: TrainingJob
    baseline: bool
    best: Proposal
    given: Proposal | None
    interval_s_interval: Interval | None
    ettr_interval: Interval | None
    lost_work_s: float
    saved: Saved | None
    warnings: tuple[str, ...]


def forecast(
    candidates: Sequence[SavingMethod],
    baseline: SavingMethod,
    job: TrainingJob,
    interval_s: float | None = None,
) -> list[Forecast]:
    """Return the forecast of each candidate, in order. Equal arguments give equal results.

    `interval_s` is one more interval to judge, the user's own.
    """
    base = _ettrs(baseline, job)
    return [_forecast(one, one is baseline, base, job, interval_s) for one in candidates]


def _forecast(
    candidate: SavingMethod,
    is_baseline: bool,
    base: list[float],
    job: TrainingJob,
    asked_s: float | None,
) -> Forecast:
    costs, own = candidate.costs, _ettrs(candidate, job)
    best = _proposal(goodput.optimal(costs.blocking_s, job.mtbf_s), costs, job)
    return Forecast(
        candidate=candidate,
        job=job,
        baseline=is_baseline,
        best=best,
        given=None if asked_s is None else _proposal(asked_s, costs, job),
        interval_s_interval=_range(
            [goodput.best_interval_s(one, job) for one in candidate.resampled]
        ),
        ettr_interval=_range(own[1:]),
        lost_work_s=goodput.lost_work_s(best.interval_s, costs, job),
        saved=None if is_baseline else _saved(own, base),
        warnings=tuple(_warnings(costs, job, best)),
    )


def _proposal(interval_s: float, costs: Costs, job: TrainingJob) -> Proposal:
    used_s = max(interval_s, costs.persist_s)
    return Proposal(
        interval_s=used_s, raised=interval_s < used_s, ettr=goodput.ettr(used_s, costs, job)
    )


def _ettrs(candidate: SavingMethod, job: TrainingJob) -> list[float]:
    """Return ETTR at the best interval: of the medians first, then of each resampled pair."""
    return [
        goodput.ettr(goodput.best_interval_s(costs, job), costs, job)
        for costs in (candidate.costs, *candidate.resampled)
    ]


def _saved(own: list[float], base: list[float]) -> Saved | None:
    """Return the saved time, paired draw by draw.

    The two sides were resampled independently, so the interval is too wide rather than too narrow.
    """
    if not (min(own) > 0 and min(base) > 0):
        return None
    if len(own) == 1 or len(base) == 1:
        own, base = own[:1], base[:1]
    wall = [MONTH_S * (1 - b / o) for o, b in zip(own, base, strict=True)]
    return Saved(wall_s=wall[0], wall_s_interval=_range(wall[1:]))


def _range(values: Sequence[float]) -> Interval | None:
    if not values:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _warnings(costs: Costs, job: TrainingJob, best: Proposal) -> Iterator[str]:
    """Yield what limits the best interval, and what leaves no time to train."""
    if job.restart_s + costs.restore_s >= job.mtbf_s:
        yield "recovery takes longer than the MTBF: most restarts fail themselves"
    if best.raised:
        yield "the persist time sets the interval: below it saves wait for each other"
