"""Simulation of a job that trains, saves, fails and restarts: it checks the formulas.

It shares no formula with `iobench.goodput`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iobench.goodput.goodput import Costs, TrainingJob

_Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of `failures` simulated failures. `*_error` is the standard error of that figure.

    `ettr` is kept work over wall-clock time. `lost_work_s` is per failure of a running job, None if
    the job never ran. A failure during a restart loses no work. `saves` counts durable checkpoints.
    """

    failures: int
    seed: int
    ettr: float
    ettr_error: float
    lost_work_s: float | None
    lost_work_error: float | None
    saves: int


def simulate(
    interval_s: float, costs: Costs, job: TrainingJob, *, failures: int, seed: int
) -> Simulated:
    """Simulate `failures` failures of `job` with a save after every `interval_s` of training.

    A failure loses the snapshots in flight, and all training after the last durable one. Restart
    and restore follow, and they may fail too. A save waits until the one before is durable. Every
    run between two failures has the same events until it ends. So the events are computed once, up
    to the longest run, and each failure is located among them. Equal arguments give equal results.
    """
    gaps = np.random.default_rng(seed).exponential(job.mtbf_s, failures)
    runs = gaps - (job.restart_s + costs.restore_s)
    ran = runs > 0
    starts, durable = _timeline(interval_s, costs, float(runs.max()))
    training = np.searchsorted(starts, runs, side="right") - 1  # the interval of each failure
    done = training * interval_s + np.minimum(runs - starts[training], interval_s)
    saves = np.where(ran, np.searchsorted(durable, runs, side="right"), 0)
    kept = saves * interval_s
    ratio = float(kept.sum() / gaps.sum())
    lost = (done - kept)[ran]
    return Simulated(
        failures=failures,
        seed=seed,
        ettr=ratio,
        ettr_error=_standard_error(kept - ratio * gaps) / float(gaps.mean()),
        lost_work_s=float(lost.mean()) if lost.size else None,
        lost_work_error=_standard_error(lost) if lost.size > 1 else None,
        saves=int(saves.sum()),
    )


def _timeline(interval_s: float, costs: Costs, until_s: float) -> tuple[_Times, _Times]:
    """Return the start of each interval and the time each save is durable, without failures."""
    events = list(_events(interval_s, costs, until_s))
    return np.array([0.0, *(end for end, _ in events)]), np.array([done for _, done in events])


def _events(interval_s: float, costs: Costs, until_s: float) -> Iterator[tuple[float, float]]:
    """Yield, for each save until `until_s`, when training goes on and when the save is durable."""
    now = durable = 0.0
    while now <= until_s:
        now = max(now + interval_s, durable) + costs.blocking_s
        durable = now + costs.persist_s
        yield now, durable


def _standard_error(values: _Times) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(values.size)
