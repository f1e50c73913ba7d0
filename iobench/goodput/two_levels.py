"""TwoLevels: frequent checkpoints in the memory of other nodes, and rarer ones on storage.

Most failures leave one copy in some memory, and the job resumes from the last checkpoint there.
The others need the last checkpoint on storage. All times are seconds; intervals are training time.
Two levels of checkpoints with two rates of failures are N. H. Vaidya's scheme (A case for two-level
recovery schemes, IEEE Transactions on Computers 47(6), 1998); memory of peers is that of Gemini
(Wang and others, SOSP 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iobench.errors import OptionError
from iobench.goodput import intervals
from iobench.goodput.costs import Costs
from iobench.goodput.job import TrainingJob

__all__ = ["MemoryCheckpoints", "TwoLevels", "simulate_two_levels", "two_levels"]


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoints:
    """Checkpoints that a snapshot makes and another node keeps in its memory.

    A snapshot is safe `replicate_s` after it was taken. `recovers` is the part of the failures
    after which every rank finds its state in some memory; then a restore takes `restore_s`.
    `interval_s` is the training time between two snapshots, and None the best one. Every
    `storage_every`-th snapshot goes to storage; None is as often as storage keeps up. Raises
    OptionError for a value out of range.
    """

    restore_s: float
    replicate_s: float = 0.0
    recovers: float = 0.9
    interval_s: float | None = None
    storage_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("restore", self.restore_s), ("replicate", self.replicate_s)):
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"memory-{name} must be zero or more seconds, and is {value}")
        if not 0 < self.recovers < 1:
            raise OptionError(
                f"memory-recovers must be above 0% and below 100%, and is {100 * self.recovers:g}%"
            )
        if self.interval_s is not None and not self.interval_s > 0:
            raise OptionError(f"memory-every must be above zero seconds, and is {self.interval_s}")
        if self.interval_s is not None and self.interval_s < self.replicate_s:
            raise OptionError(
                f"memory-every must be at least memory-replicate ({self.replicate_s:g} s): one "
                f"copy is on its way at a time; it is {self.interval_s:g} s"
            )
        if self.storage_every is not None and self.storage_every < 1:
            raise OptionError(f"storage-every must be 1 or more, and is {self.storage_every}")


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """A snapshot every `interval_s` of training, and every `storage_every`-th one on storage.

    `simulated` and its standard error are None without a simulation.
    """

    interval_s: float
    storage_every: int
    ettr: float
    simulated: float | None = None
    simulated_error: float | None = None

    @property
    def storage_interval_s(self) -> float:
        """Training time between two checkpoints on storage."""
        return self.interval_s * self.storage_every


def two_levels(
    costs: Costs,
    memory: MemoryCheckpoints,
    job: TrainingJob,
    *,
    failures: int = 0,
    seed: int = 0,
) -> TwoLevels:
    """Return the intervals and the ETTR of both levels together, for failures without memory.

    Snapshots are at the interval that is best for the failures from which memory recovers. Storage
    gets as many as it can write: that blocks nothing. `failures` are simulated, 0 for none. Raises
    OptionError for other failures (a Weibull shape), or for a synchronous save, whose snapshot is
    not known.
    """
    if job.failure_shape != 1:
        raise OptionError("memory checkpoints are planned for failures without memory (shape 1)")
    if not costs.asynchronous:
        raise OptionError("memory checkpoints need the blocking time of a snapshot")
    interval_s = memory.interval_s
    if interval_s is None:
        interval_s = intervals.optimal(costs.blocking_s, job.mtbf_s / memory.recovers)
        interval_s = max(interval_s, memory.replicate_s)  # one copy is on its way at a time
        if not interval_s:
            raise OptionError("a snapshot costs no time, so there is no best interval; give one")
    # One slot is busy for this long per checkpoint, and a snapshot is taken every period.
    slot_s, period_s = (
        (costs.blocking_s + costs.persist_s) / costs.slots,
        interval_s + costs.blocking_s,
    )
    least = max(1, math.ceil(slot_s / period_s * (1 - 1e-9)))
    every = memory.storage_every or least
    if every < least:
        raise OptionError(
            f"storage cannot keep up with every {every}. snapshot: it needs {least} intervals of "
            f"{interval_s:.3g} s"
        )
    found = TwoLevels(
        interval_s=interval_s,
        storage_every=every,
        ettr=_ettr(interval_s, every, costs, memory, job),
    )
    if not failures:
        return found
    return simulate_two_levels(found, costs, memory, job, failures=failures, seed=seed)


def _ettr(
    interval_s: float, every: int, costs: Costs, memory: MemoryCheckpoints, job: TrainingJob
) -> float:
    """Return the work that storage keeps, per time between the failures that memory cannot undo.

    The failures that it can undo let the job advance at the rate v: the exact ETTR of snapshots
    alone at the rate q / M. So W = n t of work take L = W / v on average. Such a failure also loses
    the checkpoint on its way to storage, so that each arrives with the probability
    p = e^(-P q / M). With r = e^(-L (1 - q) / M), the last one that arrived is that of the exact
    renewal formula for L times `p / (1 - (1 - p) r)`. That L is constant is the approximation.
    """
    often_s, rarely_s = job.mtbf_s / memory.recovers, job.mtbf_s / (1 - memory.recovers)
    safe_s = memory.replicate_s + job.restart_s + memory.restore_s
    advance = _renewal(interval_s, interval_s + costs.blocking_s, safe_s, often_s)
    if advance == 0:
        return 0.0
    work_s = interval_s * every
    period_s = work_s / advance
    stored_s = costs.persist_s + job.restart_s + costs.restore_s
    arrives = math.exp(-costs.persist_s / often_s)
    again = math.exp(-period_s / rarely_s)
    return _renewal(work_s, period_s, stored_s, rarely_s) * arrives / (1 - (1 - arrives) * again)


def _renewal(work_s: float, period_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Return `t e^(-R / M) / (M (e^(p / M) - 1))`: work t per period p, failures every M."""
    growth = period_s / mtbf_s
    if growth > 700:  # e^700 is the largest power of a float
        return 0.0
    return work_s * math.exp(-recovery_s / mtbf_s) / (mtbf_s * math.expm1(growth))


def simulate_two_levels(
    plan: TwoLevels,
    costs: Costs,
    memory: MemoryCheckpoints,
    job: TrainingJob,
    *,
    failures: int,
    seed: int,
) -> TwoLevels:
    """Return `plan` with the ETTR of `failures` simulated ones. Equal arguments, equal results.

    Each failure loses what is on its way to memory or storage. One that memory recovers brings the
    job back to the last safe snapshot, another one to the last checkpoint on storage; the job finds
    nothing in memory from then until its next snapshot is safe. It shares no formula with `_ettr`.
    """
    generator = np.random.default_rng(seed)
    gaps = job.failures.draw(generator, failures)
    by_memory = generator.random(failures) < memory.recovers
    position = stored = 0  # in snapshots since the start: of the job, and of the last on storage
    in_memory = False
    kept: list[int] = []
    walls: list[float] = []
    wall_s, stored_before = 0.0, 0
    recovery_s = job.restart_s + costs.restore_s
    period_s = plan.interval_s + costs.blocking_s
    for gap_s, recovers in zip(gaps.tolist(), by_memory.tolist(), strict=True):
        wall_s += gap_s
        run_s = gap_s - recovery_s
        safe = max(0, int((run_s - memory.replicate_s) // period_s)) if run_s > 0 else 0
        written = max(0, int((run_s - costs.persist_s) // period_s)) if run_s > 0 else 0
        last = (position + written) // plan.storage_every * plan.storage_every
        if last > position:  # a snapshot that the job resumed from in memory is not written again
            stored = last
        in_memory = in_memory or safe > 0
        if recovers and in_memory:
            position += safe
            recovery_s = job.restart_s + memory.restore_s
            continue
        position, in_memory = stored, False
        recovery_s = job.restart_s + costs.restore_s
        kept.append(stored - stored_before)
        walls.append(wall_s)
        wall_s, stored_before = 0.0, stored
    return _simulated(plan, np.array(kept, dtype=float) * plan.interval_s, np.array(walls))


def _simulated(
    plan: TwoLevels, kept_s: NDArray[np.float64], wall_s: NDArray[np.float64]
) -> TwoLevels:
    """Return `plan` with the ratio of the sums over the times between losses of the memory."""
    if kept_s.size < 2:
        raise OptionError("too few simulated failures lose the memory; give a higher --simulate")
    ratio = float(kept_s.sum() / wall_s.sum())
    spread = float(np.std(kept_s - ratio * wall_s, ddof=1)) / math.sqrt(kept_s.size)
    return TwoLevels(
        interval_s=plan.interval_s,
        storage_every=plan.storage_every,
        ettr=plan.ettr,
        simulated=ratio,
        simulated_error=spread / float(wall_s.mean()),
    )
