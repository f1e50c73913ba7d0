"""Measurement: what one trial of one candidate gave; Step: which trial it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from iobench.results.records import Sample
from iobench.tune.candidate import Candidate
from iobench.units import GIB

__all__ = ["Measure", "Measurement", "Phase", "Step"]

_OWN_S_PER_BYTE = 0.5 / GIB  # new random bytes, digests, removing files

Phase = Literal["probe", "race", "refine", "confirm"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One trial to make: `size_bytes` of checkpoint are asked for, what fits is moved.

    Rounds are numbered through all phases. With `verify` the restore is made and compared even
    where the objective does not need it.
    """

    phase: Phase
    round: int
    size_bytes: int
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial gave: samples, or the `error` that it failed with.

    `took_s` is how long the trial took with everything around it, `spent_s` the time since the
    trial before (what was done between them included), `written_bytes` what it wrote at least.
    `memory_bytes` is how much the resident memory of the process grew at most meanwhile; None where
    the kernel does not tell. `stall_s` is how long one asynchronous checkpoint stops training.
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
        """How long a trial with so many times the bytes would take: what waits does not grow."""
        moving_s = sum(sample.elapsed_s for sample in (self.save, self.restore) if sample)
        moving_s += (self.stall_s or 0.0) * 5
        moving_s += _OWN_S_PER_BYTE * self.written_bytes
        moving_s = min(moving_s, self.took_s)
        return self.took_s + (times - 1) * moving_s


class Measure(Protocol):
    """Makes one trial. Raises only what concerns the target and not the candidate."""

    def __call__(self, candidate: Candidate, step: Step) -> Measurement: ...
