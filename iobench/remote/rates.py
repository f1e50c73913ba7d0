"""Estimate: how long a tier takes for a byte, from recent transfers, with its spread."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Estimate", "Observation", "estimate", "failures"]

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
