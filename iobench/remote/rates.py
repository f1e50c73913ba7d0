"""What was measured of both tiers, and how long a tier takes for a byte, with its spread."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from iobench.remote.journal import DrainEvent

__all__ = [
    *("LOCAL", "REMOTE", "Estimate", "Observation", "ObservedRates", "TierHistory"),
    *("estimate", "failures"),
]

LOCAL, REMOTE = "local", "remote"
"""Names of the tiers in a history."""

_KEPT = 32

_WINDOW = 8
_NOISE = math.log(1.1)
"""Assumed spread of two transfers, until there are enough of them to measure it."""
_LEAST_NOISE = math.log(1.02)
_ENOUGH = 4
_OUTLIER = 3.0
_LEAST_CHANGE = math.log(1.15)
_ERRORS = 2.0
_MEDIAN_ERROR = math.sqrt(math.pi / 2)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A transfer of `size_bytes` to the tier `tier`, which ended at `at_s` (monotonic seconds).

    It took `elapsed_s` until the bytes were durable. Not `ok`: the tier did not take them.
    """

    tier: str
    at_s: float
    size_bytes: int
    elapsed_s: float
    ok: bool = True


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds for one byte: the median of `count` recent transfers, and an interval around it."""

    s_per_byte: float
    low: float
    high: float
    count: int

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds expected for `size_bytes`."""
        return self.s_per_byte * size_bytes


@dataclass(frozen=True, kw_only=True)
class TierHistory:
    """What was measured, oldest first, and the tier chosen last, since `since_s`.

    `current` is empty before the first decision. Seconds are monotonic ones.
    """

    observations: tuple[Observation, ...] = ()
    current: str = ""
    since_s: float = 0.0

    def of(self, tier: str) -> list[Observation]:
        """Return the transfers of `tier`, oldest first."""
        return [one for one in self.observations if one.tier == tier]


def failures(observations: Sequence[Observation]) -> int:
    """Return the number of failed transfers at the end of `observations`, those of one tier."""
    count = 0
    for one in reversed(observations):
        if one.ok:
            break
        count += 1
    return count


def estimate(observations: Sequence[Observation]) -> Estimate | None:
    """Return the estimate from the transfers of one tier, oldest first; None without one.

    The logarithms of seconds per byte are compared. The noise is the median difference of two
    transfers that follow each other, which a step change does not alter. Recent is what differs
    from the newest transfers by less than three times the noise: the estimate forgets what was
    before a change, and ignores a single transfer that differs. Nothing before a failure counts.
    The interval is 2 standard errors of the median (1.25 noise / sqrt(count)) wide on each side.
    """
    after = next((n for n, one in enumerate(reversed(observations)) if not one.ok), None)
    kept = observations if after is None else observations[len(observations) - after :]
    newest_first = [
        math.log(max(one.elapsed_s, 1e-9) / max(one.size_bytes, 1)) for one in reversed(kept)
    ][: 2 * _WINDOW]
    if not newest_first:
        return None
    noise = _noise(newest_first)
    recent = _recent(newest_first, max(_OUTLIER * noise, _LEAST_CHANGE))
    middle = statistics.median(recent)
    error = _ERRORS * _MEDIAN_ERROR * noise / math.sqrt(len(recent))
    return Estimate(
        s_per_byte=math.exp(middle),
        low=math.exp(middle - error),
        high=math.exp(middle + error),
        count=len(recent),
    )


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of one value, from the differences of neighbours.

    The median of the absolute difference of two values is 0.954 standard deviations.
    """
    found = [abs(one - other) / 0.954 for one, other in itertools.pairwise(values)]
    assumed = [_NOISE] * max(0, _ENOUGH - len(found))
    return max(statistics.median([*found, *assumed]), _LEAST_NOISE)


def _recent(newest_first: Sequence[float], tolerance: float) -> list[float]:
    """Return the newest values, up to the first two that both differ from their median."""
    recent = [newest_first[0]]
    differed = False
    for value in newest_first[1:]:
        if len(recent) == _WINDOW:
            break
        if abs(value - statistics.median(recent)) <= tolerance:
            recent.append(value)
            differed = False
        elif differed:
            break
        else:
            differed = True
    return recent


class ObservedRates:
    """The last 32 transfers to each tier. Any thread may add one. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = {name: deque[Observation](maxlen=_KEPT) for name in (LOCAL, REMOTE)}
        self._current, self._since_s = "", 0.0

    def add(
        self,
        tier: str,
        size_bytes: int,
        elapsed_s: float,
        *,
        ok: bool = True,
        at_s: float | None = None,
    ) -> None:
        """Record a transfer that ended at `at_s`, or now; not `ok`: it failed."""
        one = Observation(
            tier=tier,
            at_s=self._clock() if at_s is None else at_s,
            size_bytes=size_bytes,
            elapsed_s=elapsed_s,
            ok=ok,
        )
        with self._lock:
            self._seen[tier].append(one)

    def recall(self, events: Iterable[DrainEvent]) -> None:
        """Begin with the rates in a journal."""
        offset_s = self._clock() - time.time()
        for one in events:
            tier, size = {
                "saved": (LOCAL, one.size_bytes),
                "durable": (REMOTE, one.sent_bytes),
            }.get(one.event, ("", 0))
            if size and one.elapsed_s > 0:  # the clock may have been set back
                at_s = min(one.at_s + offset_s, self._clock())
                self.add(tier, size, one.elapsed_s, at_s=at_s)

    def estimate(self, tier: str) -> Estimate | None:
        """Return the estimate of a tier; None without a transfer since its last failure."""
        with self._lock:
            return estimate(list(self._seen[tier]))

    def history(self) -> TierHistory:
        """Return everything for `choose`."""
        with self._lock:
            merged = sorted(
                (one for seen in self._seen.values() for one in seen), key=lambda one: one.at_s
            )
            return TierHistory(
                observations=tuple(merged), current=self._current, since_s=self._since_s
            )

    def chosen(self, tier: str) -> None:
        """Record a decision."""
        with self._lock:
            if tier != self._current:
                self._current, self._since_s = tier, self._clock()
