"""Budget: the seconds and written bytes that a tuning may spend, and their shares by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from iobench.errors import OptionError
from iobench.tune.measurement import Measurement
from iobench.units import GIB, format_size_exact

DEFAULT_SECONDS, DEFAULT_BYTES = 180.0, 80 * GIB
SLACK = 1.25
"""Factor by which trials of the confirmation are expected to last longer than earlier trials."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and written bytes: the expected cost of trials, or a part of the budget."""

    time_s: float
    written_bytes: int

    def plus(self, other: Cost, *, times: int = 1) -> Cost:
        """Return the cost of this and `times` times `other`."""
        return Cost(
            time_s=self.time_s + times * other.time_s,
            written_bytes=self.written_bytes + times * other.written_bytes,
        )

    def covers(self, other: Cost, *, times: int = 1) -> bool:
        """Return whether this is enough for `times` times `other`."""
        return (
            times * other.written_bytes <= self.written_bytes
            and times * other.time_s <= self.time_s
        )


NOTHING = Cost(time_s=0.0, written_bytes=0)


@dataclass(kw_only=True)
class Budget:
    """The limits of a tuning and what it has spent. A trial begins only if it is expected to fit.

    The bytes of a trial are known before it begins, so `max_bytes` is never exceeded. The last
    trial may be slower than expected, so `max_s` may be exceeded by that much. `set_aside` divides
    the rest in two: the confirmation's `reserve` and the race's `share`. `left` is the fraction of
    the race's share that is left.
    """

    max_s: float = DEFAULT_SECONDS
    max_bytes: int = DEFAULT_BYTES
    spent_s: float = field(default=0.0, init=False)
    written_bytes: int = field(default=0, init=False)
    reserve: Cost = field(default=NOTHING, init=False)
    share: Cost = field(init=False)

    def __post_init__(self) -> None:
        if not self.max_s > 0:
            raise OptionError(f"--max-time must be above zero, and is {self.max_s:g}s")
        if not self.max_bytes > 0:
            size = format_size_exact(self.max_bytes)
            raise OptionError(f"--max-bytes must be above zero, and is {size}")
        self.set_aside(self.reserve)

    def spend(self, one: Measurement) -> None:
        """Add the time and the written bytes of a trial."""
        self.spent_s += one.spent_s
        self.written_bytes += one.written_bytes

    @property
    def left_s(self) -> float:
        """Seconds left; negative after trials that were slower than expected."""
        return self.max_s - self.spent_s

    @property
    def left_bytes(self) -> int:
        return self.max_bytes - self.written_bytes

    @property
    def left_cost(self) -> Cost:
        """What is left of both."""
        return Cost(time_s=self.left_s, written_bytes=self.left_bytes)

    def set_aside(self, reserve: Cost) -> None:
        """Keep `reserve` for the confirmation; the rest of what is left is the race's share."""
        self.reserve, self.share = reserve, self._beside(reserve)

    def part(self, cost: Cost) -> float:
        """Return `cost` as a fraction of the race's share: of seconds or bytes, the larger."""
        return max(cost.written_bytes / self.share.written_bytes, cost.time_s / self.share.time_s)

    @property
    def left(self) -> float:
        """The fraction of the race's share that is left: of seconds or bytes, the smaller."""
        left = self._beside(self.reserve)
        return min(left.written_bytes / self.share.written_bytes, left.time_s / self.share.time_s)

    def races(self, cost: Cost, *, until: float) -> bool:
        """Return whether a round of the race may begin: it must leave `until` of the share."""
        return self.left - self.part(cost) >= until

    def affordable(self, each: Cost, *, rounds: int, until: float) -> int:
        """Return how many settings can run `rounds` rounds and leave `until` of the share."""
        return max(0, int((self.left - until) / (rounds * self.part(each))))

    def confirms(self, cost: Cost, *, enough: bool) -> bool:
        """Return whether a round of the confirmation may begin.

        Its bytes must always fit. Its time must fit once there are `enough` samples. Before that,
        the time may be exceeded by up to the reserve's seconds, so that a tuning has an answer even
        where the storage became slower.
        """
        if cost.written_bytes > self.left_bytes or self.left_s < -self.reserve.time_s:
            return False
        return not enough or self.left_s >= SLACK * cost.time_s

    def _beside(self, reserve: Cost) -> Cost:
        """Return what is left now, without `reserve`."""
        return Cost(
            time_s=self.left_s - reserve.time_s,
            written_bytes=self.left_bytes - reserve.written_bytes,
        )
