"""Saves of a live run with placement, and the oracle that knows the rates of the link."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from iobench.remote.observed import LOCAL, REMOTE

__all__ = ["Run", "Timed", "fixed_s", "oracle_s", "shown"]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A save: when it began, by the monotonic clock, and where it went.

    Seconds after that: training went on after `stall_s`, it was durable after `elapsed_s`, and in
    the remote tier after `remote_s`, if it was there before the end of the run.
    """

    began_s: float
    stall_s: float
    elapsed_s: float
    remote_s: float | None
    tier: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """The saves of a run, and the rates of the link in bytes per second, each since a moment."""

    saves: Sequence[Timed]
    rates: Sequence[tuple[float, float]]

    @property
    def total_s(self) -> float:
        return sum(one.elapsed_s for one in self.saves)

    def under(self, other: Run) -> Run:
        """Return this run, which did not depend on the link, with the rates of `other`."""
        offset_s = self.rates[0][0] - other.rates[0][0]
        return replace(self, rates=[(at + offset_s, rate) for at, rate in other.rates])

    def sent_s(self, begin_s: float, size: float) -> float:
        """Return how long `size` bytes take over the link from `begin_s` on."""
        ends = [since_s for since_s, _ in self.rates[1:]] + [float("inf")]
        now_s, left = begin_s, size
        for (_, rate), end_s in zip(self.rates, ends, strict=True):
            if end_s <= now_s:
                continue
            if rate and left / rate <= end_s - now_s:
                return now_s + left / rate - begin_s
            left -= rate * (end_s - now_s) if rate else 0.0
            now_s = end_s
        return float("inf")


def fixed_s(run: Run, tier: str, seconds: Callable[[Run, Timed], float]) -> float:
    """Return what a save to `tier` needs in excess of `seconds`: the median of a run."""
    return statistics.median(
        one.elapsed_s - seconds(run, one) for one in run.saves if one.tier == tier
    )


def oracle_s(run: Run, fixed: dict[str, float], size: int, local_rate: int) -> list[float]:
    """Return the seconds to durable of each save of a run in the better tier."""
    local_s = size / local_rate + fixed[LOCAL]
    return [min(local_s, run.sent_s(one.began_s, size) + fixed[REMOTE]) for one in run.saves]


def shown(tiers: Sequence[str]) -> str:
    """The tiers in order, such as "3 local, 25 remote"."""
    groups = itertools.groupby(tiers)
    return ", ".join(f"{len(list(some))} {tier}" for tier, some in groups)
