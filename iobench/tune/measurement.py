"""Measurement: the result of one trial of one candidate. Step: which trial it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from iobench.results.records import Sample
from iobench.tune.space import Candidate
from iobench.units import GIB

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


class Measure(Protocol):
    """Makes one trial. Raises errors of the target only; a candidate's are in its measurement."""

    def __call__(self, candidate: Candidate, step: Step) -> Measurement: ...
