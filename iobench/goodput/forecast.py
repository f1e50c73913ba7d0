"""Forecast: best interval, ETTR, lost work and saved time of a job with one way to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from iobench.bench.judging.stats import Interval
from iobench.bench.judging.verdict import Reason
from iobench.errors import OptionError
from iobench.goodput import goodput, intervals
from iobench.goodput.costs import Costs
from iobench.goodput.job import MONTH_S, TrainingJob
from iobench.goodput.measured import SavingMethod
from iobench.goodput.simulation import Simulated, simulate
from iobench.goodput.two_levels import MemoryCheckpoints, TwoLevels, two_levels
from iobench.units import format_seconds

__all__ = ["GIVEN", "ConstantRate", "Forecast", "Method", "Proposal", "Saved", "forecast"]

GIVEN = "given"
"""The name of the user's own interval among the formulas."""
MOST_FAILURES = 10_000_000
"""The most failures to simulate: they take about 1 GB of memory."""
_FAR_BELOW = 0.1
_OFF = 0.01
_STANDARD_ERRORS = 4
_ENOUGH_SAVES = 1000


@dataclass(frozen=True, kw_only=True)
class Method:
    """How intervals are judged: CheckFreq's budget and step, and the size of the simulation.

    `interval_s` is one more interval to judge, the user's own. With `failures` 0 there is no
    simulation. With `memory`, asynchronous saves are planned with memory checkpoints too. Raises
    OptionError for a value out of range.
    """

    budget: float = 0.035
    step_s: float | None = None
    interval_s: float | None = None
    failures: int = 100_000
    seed: int = 0
    memory: MemoryCheckpoints | None = None

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise OptionError(f"budget must be above zero, and is {self.budget}")
        if self.step_s is not None and not self.step_s > 0:
            raise OptionError(f"--step must be above zero seconds, and is {self.step_s}")
        if self.interval_s is not None and not self.interval_s > 0:
            raise OptionError(f"--interval must be above zero seconds, and is {self.interval_s}")
        if self.failures == 1 or not 0 <= self.failures <= MOST_FAILURES:
            raise OptionError(
                f"--simulate must be 0, or from 2 to {MOST_FAILURES:,}, and is {self.failures:,}"
            )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The interval of one formula, and its ETTR: exact, first order, simulated.

    `raised` is true where the formula gave a shorter interval, at which saves wait for slots.
    """

    formula: str
    interval_s: float
    raised: bool
    ettr: float
    first_order_ettr: float
    simulated: Simulated | None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Time that the same work takes less than with the baseline, per 30 days of the baseline."""

    wall_s: float
    gpu_hours: float
    wall_s_interval: Interval | None
    gpu_hours_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class ConstantRate:
    """Best interval and ETTR if the failures had shape 1 and the same mean.

    `ettr_change` is the ETTR of the job's shape less this one, with its interval from samples.
    """

    interval_s: float
    ettr: float
    ettr_change: float
    ettr_change_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One candidate in one job. `best` is the proposal that maximises ETTR, `proposals` are all.

    Intervals hold 95% of the values from resampled medians; None without samples. `saved` is None
    for the baseline, and where no work gets done. `lost_work_s` is per failure of the running job.
    `constant_rate` is None where the job's failures have shape 1. `memory` is the plan with memory
    checkpoints; None without them, and for synchronous saves.
    """

    candidate: SavingMethod
    job: TrainingJob
    baseline: bool
    best: Proposal
    interval_s_interval: Interval | None
    ettr_interval: Interval | None
    lost_work_s: float
    saved: Saved | None
    constant_rate: ConstantRate | None
    memory: TwoLevels | None
    proposals: tuple[Proposal, ...]
    warnings: tuple[Reason, ...]

    @property
    def interval_method(self) -> str:
        """How the best interval was found: `slots` (their limit), `equation` or `numeric`."""
        if self.best.raised:
            return "slots"
        return "equation" if self.job.failure_shape == 1 else "numeric"


def forecast(
    candidates: Sequence[SavingMethod], baseline: SavingMethod, job: TrainingJob, method: Method
) -> list[Forecast]:
    """Return the forecast of each candidate, in order. Equal arguments give equal results."""
    base = _ettrs(baseline, job)
    return [_forecast(one, one is baseline, base, job, method) for one in candidates]


def _forecast(
    candidate: SavingMethod, is_baseline: bool, base: list[float], job: TrainingJob, method: Method
) -> Forecast:
    costs = candidate.costs
    proposals = tuple(
        _proposal(name, interval_s, costs, job, method)
        for name, interval_s in _formulas(costs, job, method)
    )
    best = proposals[0]
    memory = None
    if method.memory is not None and costs.asynchronous:
        memory = two_levels(costs, method.memory, job, failures=method.failures, seed=method.seed)
    return Forecast(
        candidate=candidate,
        job=job,
        baseline=is_baseline,
        best=best,
        interval_s_interval=_range(
            [goodput.best_interval_s(one, job) for one in candidate.resampled]
        ),
        ettr_interval=_range(_ettrs(candidate, job)[1:]),
        lost_work_s=goodput.lost_work_s(best.interval_s, costs, job),
        saved=None if is_baseline else _saved(_ettrs(candidate, job), base, job),
        constant_rate=_constant_rate(candidate, job),
        memory=memory,
        proposals=proposals,
        warnings=(*_warnings(costs, job, proposals), *_memory_warnings(memory)),
    )


def _formulas(costs: Costs, job: TrainingJob, method: Method) -> Iterator[tuple[str, float]]:
    save_s, mtbf_s = costs.blocking_s, job.mtbf_s
    recovery_s = job.restart_s + costs.restore_s
    if job.failure_shape == 1:
        yield "best", intervals.optimal(save_s, mtbf_s)
    else:
        yield "best", goodput.best_interval_s(costs, job)
        yield "constant rate", intervals.optimal(save_s, mtbf_s)
    yield "Young", intervals.young(save_s, mtbf_s)
    yield "Daly", intervals.daly(save_s, mtbf_s)
    yield "availability", intervals.availability_optimal(save_s, mtbf_s, recovery_s)
    yield "CheckFreq", intervals.by_budget(costs, method.budget, method.step_s)
    if method.interval_s is not None:
        yield GIVEN, method.interval_s


def _proposal(
    name: str, interval_s: float, costs: Costs, job: TrainingJob, method: Method
) -> Proposal:
    least = intervals.shortest(costs)
    used = max(interval_s, least)
    # The numeric search looks at no interval below the limit.
    at_limit = name == "best" and job.failure_shape != 1 and interval_s == least > 0
    return Proposal(
        formula=name,
        interval_s=used,
        raised=interval_s < least or at_limit,
        ettr=goodput.ettr(used, costs, job),
        first_order_ettr=goodput.first_order_ettr(used, costs, job),
        simulated=simulate(used, costs, job, failures=method.failures, seed=method.seed)
        if method.failures
        else None,
    )


def _ettrs(candidate: SavingMethod, job: TrainingJob) -> list[float]:
    """Return ETTR at the best interval: of the medians first, then of each resampled pair."""
    known: dict[Costs, float] = {}
    for costs in (candidate.costs, *candidate.resampled):
        if costs not in known:
            interval_s = goodput.best_interval_s(costs, job)
            known[costs] = goodput.ettr(interval_s, costs, job)
    return [known[costs] for costs in (candidate.costs, *candidate.resampled)]


def _constant_rate(candidate: SavingMethod, job: TrainingJob) -> ConstantRate | None:
    if job.failure_shape == 1:
        return None
    constant = replace(job, failure_shape=1.0)
    ettrs = _ettrs(candidate, constant)
    changes = [own - one for own, one in zip(_ettrs(candidate, job), ettrs, strict=True)]
    return ConstantRate(
        interval_s=goodput.best_interval_s(candidate.costs, constant),
        ettr=ettrs[0],
        ettr_change=changes[0],
        ettr_change_interval=_range(changes[1:]),
    )


def _saved(own: list[float], base: list[float], job: TrainingJob) -> Saved | None:
    """Return the saved time, paired draw by draw.

    The two sides were resampled independently, so the interval is too wide rather than too narrow.
    """
    if not (min(own) > 0 and min(base) > 0):
        return None
    if len(own) == 1 or len(base) == 1:
        own, base = own[:1], base[:1]
    wall = [MONTH_S * (1 - b / o) for o, b in zip(own, base, strict=True)]
    gpu_hours = [seconds / 3600 * job.gpus for seconds in wall]
    return Saved(
        wall_s=wall[0],
        gpu_hours=gpu_hours[0],
        wall_s_interval=_range(wall[1:]),
        gpu_hours_interval=_range(gpu_hours[1:]),
    )


def _range(values: Sequence[float]) -> Interval | None:
    if not values:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(float(low), float(high))


def _warnings(costs: Costs, job: TrainingJob, proposals: Sequence[Proposal]) -> Iterator[Reason]:
    """Yield the assumptions of the formulas that do not hold here."""
    mtbf = job.mtbf_s
    recovery = job.restart_s + costs.restore_s
    overhead_s = costs.blocking_s + costs.persist_s + recovery
    if overhead_s > _FAR_BELOW * mtbf:
        yield Reason(
            text="save and recovery are not far below the MTBF, as Young, availability and the "
            "first-order ETTR assume",
            measured=(f"{format_seconds(overhead_s)} of {format_seconds(mtbf)}",),
        )
    if costs.blocking_s >= 2 * mtbf:
        yield Reason(text="a save takes two MTBF or more, and Daly's formula returns the MTBF")
    if recovery >= mtbf:
        yield Reason(text="recovery takes longer than the MTBF: most restarts fail themselves")
    if proposals[0].raised:
        yield Reason(text="the persist time sets the interval: below it saves wait for slots")
    for one in proposals:
        yield from _check(one, one is proposals[0])


def _check(proposal: Proposal, best: bool) -> Iterator[Reason]:
    """Compare the formulas with the simulation at one interval; yield the differences."""
    found = proposal.simulated
    if found is None:
        return
    if found.saves < _ENOUGH_SAVES:
        text = f"too few simulated saves became durable to check the {proposal.formula} interval"
        yield Reason(text=text, measured=(f"{found.saves:,}",))
        return
    error = _STANDARD_ERRORS * found.ettr_error
    if abs(proposal.ettr - found.ettr) > error:
        text = "exact and simulated ETTR differ by more than chance explains: believe neither"
        yield Reason(text=text, measured=(proposal.formula,))
    off = proposal.first_order_ettr - found.ettr
    if best and abs(off) > max(_OFF, error):
        text = f"the first-order ETTR is too {'high' if off > 0 else 'low'}"
        yield Reason(text=text, measured=(f"by {abs(off):.3f}",))


def _memory_warnings(memory: TwoLevels | None) -> Iterator[Reason]:
    """Yield by how much the formula of two levels is off, if that is more than chance explains."""
    if memory is None or memory.simulated is None or memory.simulated_error is None:
        return
    off = memory.ettr - memory.simulated
    if abs(off) > max(_OFF, _STANDARD_ERRORS * memory.simulated_error):
        text = f"the ETTR with memory checkpoints is too {'high' if off > 0 else 'low'}"
        yield Reason(text=text, measured=(f"by {abs(off):.3f}",))
