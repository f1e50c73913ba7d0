"""Placement: which tier the next checkpoint is written to, decided by measured rates.

TierHistory: what was measured. Estimate: how long a tier takes for a byte, with its spread.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from iobench.errors import OptionError
from iobench.units import format_seconds

LOCAL, REMOTE = "local", "remote"
"""Names of the tiers in a history."""

_KEPT, _WINDOW = 16, 3
_NOISE, _LEAST_NOISE = math.log(1.1), math.log(1.02)
"""Assumed spread of two transfers, until there are three of them to measure it."""
_ERROR = 2.0 * math.sqrt(math.pi / 2)
"""Two standard errors of a median, of one value."""


class Observation(NamedTuple):
    """A transfer to a tier: `size_bytes` were durable after `elapsed_s`.

    `number` counts the transfers to both tiers. Not `ok`: the tier did not take them.
    """

    number: int
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


@dataclass(kw_only=True)
class TierHistory:
    """The last transfers `seen` of each tier, oldest first, and the tier that was chosen last.

    `current` is empty before the first decision. Any thread may add a transfer, and a signal
    handler that saves: an append is one step, and so is a copy.
    """

    seen: dict[str, deque[Observation]] = field(
        default_factory=lambda: {name: deque(maxlen=_KEPT) for name in (LOCAL, REMOTE)}
    )
    current: str = ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def add(self, tier: str, size_bytes: int, elapsed_s: float, *, ok: bool = True) -> None:
        """Record a transfer that has ended now; not `ok`: it failed."""
        self.seen[tier].append(Observation(next(self._numbers), size_bytes, elapsed_s, ok))


def failures(observations: Sequence[Observation]) -> int:
    """Return the number of failed transfers at the end of `observations`."""
    return len(list(itertools.takewhile(lambda one: not one.ok, reversed(observations))))


def estimate(observations: Sequence[Observation]) -> Estimate | None:
    """Return the estimate from the transfers of one tier, oldest first; None without one.

    The logarithms of seconds per byte are compared: their median over the last 3 transfers since a
    failure, which a single one that differs does not move. The noise is the median difference of
    two that follow each other. The interval is 2 standard errors of the median (1.25 noise /
    sqrt(count)) wide on each side.
    """
    kept = itertools.takewhile(lambda one: one.ok, reversed(observations))
    last = itertools.islice(kept, _WINDOW)
    recent = [math.log(max(one.elapsed_s, 1e-9) / max(one.size_bytes, 1)) for one in last]
    if not recent:
        return None
    # The median of the absolute difference of two values is 0.954 standard deviations.
    spread = [abs(one - other) / 0.954 for one, other in itertools.pairwise(recent)]
    assumed = [_NOISE] * (_WINDOW - len(recent))
    noise = max(statistics.median([*spread, *assumed]), _LEAST_NOISE)
    middle = statistics.median(recent)
    error = _ERROR * noise / math.sqrt(len(recent))
    return Estimate(
        s_per_byte=math.exp(middle),
        low=math.exp(middle - error),
        high=math.exp(middle + error),
        count=len(recent),
    )


PlacementGoal = Literal["durable", "bandwidth", "capacity"]

_MARGIN = 1.05
"""A tier that is less than 5% faster is not worth a switch."""
_CONFIRMED = 2
"""Recent transfers of each tier that a switch needs: one slow transfer never switches."""
_PROBE_EVERY = 4
"""After so many saves to the remote tier, the local one is measured again."""
_LEAST_LIMIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the tier of a save is chosen: local storage or the remote tier.

    - `goal`: "durable" takes the tier with the soonest durable copy; "bandwidth" spares the
      network: local storage as long as it works and has room; "capacity" spares local storage

    Raises OptionError for another goal.
    """

    goal: PlacementGoal = "durable"

    def __post_init__(self) -> None:
        if self.goal not in get_args(PlacementGoal):
            raise OptionError(f"goal={self.goal!r}: one of {', '.join(get_args(PlacementGoal))}")


@dataclass(frozen=True, kw_only=True)
class PlacementDecision:
    """The tier for the next checkpoint, and why.

    `probe`: the estimate of the local tier is too old or not confirmed, so a small transfer should
    measure it after a save to the remote one. (Copies of local saves measure the remote tier.)
    `limit_s` is how long the save may take: as if it were saved to both tiers in turn. So a server
    that does not answer costs at most the time of a good remote save.
    """

    tier: str
    reason: str
    probe: bool = False
    limit_s: float | None = None


def choose(
    history: TierHistory,
    goal: PlacementGoal,
    *,
    size_bytes: int,
    closed: Mapping[str, str] | None = None,
) -> PlacementDecision:
    """Return the tier for a checkpoint of `size_bytes`: a pure function.

    A tier that is `closed`, for the reason there, or whose last transfer failed, is left at once.
    It is chosen again when new transfers show that it is faster. Between working tiers a switch
    needs a difference of 5% and intervals that do not overlap, each of two transfers or more.
    """
    seen = {name: tuple(found) for name, found in history.seen.items()}
    closed = closed or {}
    failed = {
        name: f"{name} failed {count} times in a row"
        for name, found in seen.items()
        if (count := failures(found))
    }
    problems = {**failed, **closed}
    figures = {name: one for name, found in seen.items() if (one := estimate(found)) is not None}
    order = [REMOTE, LOCAL] if goal == "capacity" else [LOCAL, REMOTE]
    usable, why = [name for name in order if name not in problems], "; ".join(problems.values())
    if not usable:
        tier, reason = order[0], f"no tier is usable: {why}"
    elif problems:
        tier, reason = usable[0], why
    elif goal != "durable":
        tier, reason = order[0], f"goal {goal}"
    else:
        tier, reason = _soonest(figures, history.current or LOCAL, size_bytes)
    probe = tier == REMOTE and LOCAL not in closed and _is_due(seen)
    limit_s = None
    if goal == "durable" and len(figures) > 1:
        limit_s = max(sum(one.high for one in figures.values()) * size_bytes, _LEAST_LIMIT_S)
    return PlacementDecision(tier=tier, reason=reason, probe=probe, limit_s=limit_s)


def _soonest(figures: Mapping[str, Estimate], current: str, size_bytes: int) -> tuple[str, str]:
    """Return the tier with the soonest durable copy, as far as it is proved, and why."""
    other = REMOTE if current == LOCAL else LOCAL
    if len(figures) == 2 and all(one.count >= _CONFIRMED for one in figures.values()):
        fast, slow = figures[other], figures[current]
        if fast.high < slow.low and fast.s_per_byte * _MARGIN < slow.s_per_byte:
            times = [format_seconds(one.seconds(size_bytes)) for one in (fast, slow)]
            return other, f"{other} takes {times[0]}, {current} {times[1]}"
    return current, "no difference is proved"


def _is_due(seen: Mapping[str, Sequence[Observation]]) -> bool:
    """Return whether the local tier should be measured after a save to the remote one."""
    own = seen[LOCAL]
    newer = sum(one.number > own[-1].number for one in seen[REMOTE]) if own else _PROBE_EVERY
    return newer >= _PROBE_EVERY or len(own) < _CONFIRMED
