"""Budget: seconds and bytes written that a tuning may spend, and how they are shared out."""

from __future__ import annotations

from dataclasses import dataclass, field

from iobench.errors import OptionError
from iobench.tune.measurement import Measurement
from iobench.units import GIB, format_size_exact

__all__ = ["DEFAULT_BYTES", "DEFAULT_SECONDS", "SLACK", "Budget", "Cost"]

DEFAULT_SECONDS, DEFAULT_BYTES = 180.0, 60 * GIB
SLACK = 1.25
"""Trials of the confirmation are taken to last this much longer than those before."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and bytes written: what trials are expected to take, or what is there for them."""

    time_s: float
    written_bytes: int

    def covers(self, other: Cost, *, times: int = 1) -> bool:
        """Whether it is enough for `other`, so many times."""
        return (
            times * other.written_bytes <= self.written_bytes
            and times * other.time_s <= self.time_s
        )


@dataclass(kw_only=True)
class Budget:
    """What may be spent, and what was. No trial begins that is not expected to fit.

    Bytes are known before, so `max_bytes` holds; a last trial may be slower than expected, so
    `max_s` may be exceeded by that much. `set_aside` parts what is left in two: the confirmation's
    `reserve`, and the race's `share`, of which the race is told how much is left, of 1.
    """

    max_s: float = DEFAULT_SECONDS
    max_bytes: int = DEFAULT_BYTES
    spent_s: float = field(default=0.0, init=False)
    written_bytes: int = field(default=0, init=False)
    reserve: Cost = field(default=Cost(time_s=0.0, written_bytes=0), init=False)
    share: Cost = field(init=False)

    def __post_init__(self) -> None:
        if not self.max_s > 0:
            raise OptionError(f"--max-time must be above zero, and is {self.max_s:g}s")
        if not self.max_bytes > 0:
            size = format_size_exact(self.max_bytes)
            raise OptionError(f"--max-bytes must be above zero, and is {size}")
        self.set_aside(self.reserve)

    def spend(self, one: Measurement) -> None:
        """Count what a trial took."""
        self.spent_s += one.spent_s
        self.written_bytes += one.written_bytes

    @property
    def left_s(self) -> float:
        """Below zero once trials were slower than expected."""
        return self.max_s - self.spent_s

    @property
    def left_bytes(self) -> int:
        return self.max_bytes - self.written_bytes

    def set_aside(self, reserve: Cost) -> None:
        """Keep `reserve` for the confirmation; all else that is left now is the race's share."""
        self.reserve, self.share = reserve, self._beside(reserve)

    def part(self, cost: Cost) -> float:
        """What `cost` is of the race's share: of its seconds or its bytes, whichever is more."""
        return max(cost.written_bytes / self.share.written_bytes, cost.time_s / self.share.time_s)

    @property
    def left(self) -> float:
        """What is left of the race's share, of 1: of its seconds or its bytes, what is less."""
        left = self._beside(self.reserve)
        return min(left.written_bytes / self.share.written_bytes, left.time_s / self.share.time_s)

    def races(self, cost: Cost, *, until: float) -> bool:
        """Whether a round of the race may begin: after it, `until` of the share must be left."""
        return self.left - self.part(cost) >= until

    def affordable(self, each: Cost, *, rounds: int, until: float) -> int:
        """How many settings can take part in so many rounds until only `until` is left."""
        return max(0, int((self.left - until) / (rounds * self.part(each))))

    def confirms(self, cost: Cost, *, enough: bool) -> bool:
        """Whether a round of the confirmation may begin.

        Its bytes must fit. Its time must where there are `enough` samples already; until then it
        may be overdrawn by as much again as was set aside: that the storage became slower is no
        reason to have no answer.
        """
        if cost.written_bytes > self.left_bytes or self.left_s < -self.reserve.time_s:
            return False
        return not enough or self.left_s >= SLACK * cost.time_s

    def _beside(self, reserve: Cost) -> Cost:
        """What is left now but for `reserve`."""
        return Cost(
            time_s=self.left_s - reserve.time_s,
            written_bytes=self.left_bytes - reserve.written_bytes,
        )
