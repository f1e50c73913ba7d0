"""What moves in a simulation of tiers: SimulatedSave and SimulatedTransfer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from iobench.tiers.plan import PlannedSave, SaveEnd

__all__ = ["SimulatedSave", "SimulatedTransfer", "exact"]


def exact(seconds: float) -> Fraction:
    """Return the seconds to the nanosecond, as a fraction with a short denominator."""
    return Fraction(seconds).limit_denominator(10**9)


@dataclass
class SimulatedSave:
    """A save on its way through the tiers."""

    number: int
    at: Fraction
    trained: Fraction
    called: Fraction | None = None  # when it has waited for the lag
    lag_wait: Fraction = Fraction(0)
    memory_wait: Fraction = Fraction(0)
    copy: Fraction = Fraction(0)
    slot: int | None = None
    parts: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    end: SaveEnd = "durable"
    tier: str = ""
    local: Fraction | None = None
    remote: Fraction | None = None
    sent: Fraction = Fraction(0)  # bytes that failed attempts have copied

    def planned(self) -> PlannedSave:
        """Return the result."""
        return PlannedSave(
            number=self.number,
            at_s=float(self.at),
            trained_s=float(self.trained),
            lag_wait_s=float(self.lag_wait),
            memory_wait_s=float(self.memory_wait),
            copy_s=float(self.copy),
            end=self.end,
            tier=self.tier,
            local_s=None if self.local is None else float(self.local),
            remote_s=None if self.remote is None else float(self.remote),
            used=self.used,
        )


@dataclass
class SimulatedTransfer:
    """A transfer to or from a tier: `wait` seconds, in which nothing moves, then `left` bytes.

    At `until` it has failed. `spent` are the seconds without pauses, `silent` those since the tier
    has last answered.
    """

    job: SimulatedSave | None
    tier: str
    kind: Literal["save", "probe", "copy", "read back", "look"]
    left: Fraction
    wait: Fraction = Fraction(0)
    until: Fraction | None = None
    spent: Fraction = Fraction(0)
    silent: Fraction = Fraction(0)

    def advance(self, passed: Fraction, rate: int) -> None:
        """Move on by `passed` seconds at `rate` bytes per second; 0: the tier does not answer."""
        self.spent += passed
        if not rate:
            self.silent += passed
            return
        self.silent = Fraction(0)
        waited = min(passed, self.wait)
        self.wait -= waited
        self.left -= (passed - waited) * rate

    def ended(self) -> bool:
        """Whether all bytes have moved."""
        return self.left <= 0

    def failed(self, now: Fraction, timeout: Fraction) -> bool:
        """Whether it takes too long, or the tier has not answered for `timeout` seconds."""
        return (self.until is not None and now >= self.until) or self.silent >= timeout

    def next_event(self, now: Fraction, rate: int, timeout: Fraction) -> Fraction:
        """Return when it ends or fails, at this rate."""
        after = self.wait + self.left / rate if rate else timeout - self.silent
        return now + after if self.until is None else min(now + after, self.until)
