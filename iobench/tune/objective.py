"""Objective: the loss that a tuning minimises, and the limits that a setting must keep.

Step: one trial to make. Measurement: its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from iobench.errors import OptionError, UsageError
from iobench.results.records import Operation, Sample
from iobench.stats.estimates import median
from iobench.tune.space import Candidate
from iobench.units import GIB, format_rate, format_seconds, format_size

_OWN_S_PER_BYTE = 0.5 / GIB  # new random bytes, digests, removing files

Phase = Literal["probe", "race", "refine", "confirm"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One trial to make, with a checkpoint of about `size_bytes`, as the workload can be scaled.

    Round numbers continue from phase to phase. With `verify` the restore is made and compared even
    where the objective does not need it.
    """

    phase: Phase
    round: int
    size_bytes: int
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a trial: samples, or the `error` that it failed with.

    `took_s` is the duration of the whole trial, with setup and cleanup. `spent_s` is the time since
    the end of the previous trial, with all work between them. `written_bytes` is the least that it
    wrote. `memory_bytes` is the largest growth of the process's resident memory during the trial,
    None where the kernel does not report it. `stall_s` is how long one asynchronous checkpoint
    stops training.
    """

    took_s: float
    spent_s: float
    written_bytes: int
    save: Sample | None = None
    restore: Sample | None = None
    stall_s: float | None = None
    memory_bytes: int | None = None
    error: str | None = None

    def expected_s(self, times: float) -> float:
        """Return the seconds of a trial with `times` times the bytes: waiting does not grow."""
        moving_s = sum(sample.elapsed_s for sample in (self.save, self.restore) if sample)
        moving_s += (self.stall_s or 0.0) * 5
        moving_s += _OWN_S_PER_BYTE * self.written_bytes
        moving_s = min(moving_s, self.took_s)
        return self.took_s + (times - 1) * moving_s


Measure = Callable[[Candidate, Step], Measurement]
"""Makes one trial. Raises errors of the target only; a candidate's are in its measurement."""


Goal = Literal["save", "restore", "balanced", "stall"]
SLOTS = 2
"""Snapshots that memory holds while a stall is measured."""
SAVES = SLOTS + 3
"""Checkpoints of one measurement of a stall: one per slot to warm up, and three that count."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss that a tuning minimises. Losses are positive; half the loss is twice as good.

    Only losses of checkpoints of equal size are compared.

    save       seconds per byte until a checkpoint is durable
    restore    seconds per byte of a cold restore
    balanced   their geometric mean
    stall      seconds that an asynchronous checkpoint stops training: see `measure_stall`
    """

    goal: str = "save"
    max_memory_bytes: int | None = None
    max_cpu_s_per_gib: float | None = None

    def __post_init__(self) -> None:
        if self.goal not in get_args(Goal):
            raise UsageError(f"--objective {self.goal}: must be one of {', '.join(get_args(Goal))}")
        limits = {"memory": self.max_memory_bytes, "cpu": self.max_cpu_s_per_gib}
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < math.inf:
                raise OptionError(f"--max-{name} must be above zero and finite, and is {limit}")

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations whose times it counts, in every trial; none for a stall."""
        match self.goal:
            case "save" | "restore":
                return (self.goal,)
            case "balanced":
                return ("save", "restore")
        return ()

    def writes(self, verify: bool) -> int:
        """Return how many times its size a trial writes. A verified stall makes one more save."""
        return SAVES + verify if self.goal == "stall" else 1

    def loss(self, one: Measurement) -> float:
        """Return the loss of a measurement that has no error."""
        if self.goal == "stall":
            assert one.stall_s is not None
            return one.stall_s
        if self.goal == "save":
            return _s_per_byte(one.save)
        if self.goal == "restore":
            return _s_per_byte(one.restore)
        return math.sqrt(_s_per_byte(one.save) * _s_per_byte(one.restore))

    def over(self, measured: Sequence[Measurement]) -> str:
        """Return which limit the measurements of one setting exceed, in words; empty for none.

        Memory counts by its maximum. CPU counts by the median of three or more samples, because one
        sample of CPU time is noisy.
        """
        most, limit = self.max_memory_bytes, self.max_cpu_s_per_gib
        memory = max((one.memory_bytes or 0 for one in measured), default=0)
        if most is not None and memory > most:
            return f"{format_size(memory)} of memory, --max-memory is {format_size(most)}"
        if limit is None:
            return ""
        for samples in ([one.save for one in measured], [one.restore for one in measured]):
            cpus = [cpu_s_per_gib(sample) for sample in samples if sample is not None]
            if len(cpus) > 2 and median(cpus) > limit:
                return f"{median(cpus):.2f} CPU s/GiB, --max-cpu is {limit:g}"
        return ""

    def show(self, loss: float, size_bytes: int) -> str:
        """Return a loss in the form that a person reads: a rate, or a stall."""
        if self.goal == "stall":
            return f"{format_seconds(loss)} per {format_size(size_bytes)}"
        return format_rate(1 / loss)


def cpu_s_per_gib(sample: Sample) -> float:
    """Return the CPU seconds of the process, user and system, per GiB moved."""
    return sample.cpu_s / (sample.bytes / GIB)


def _s_per_byte(sample: Sample | None) -> float:
    assert sample is not None
    return sample.elapsed_s / sample.bytes
