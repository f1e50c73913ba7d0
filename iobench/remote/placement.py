"""Placement: which tier the next checkpoint is written to, decided by measured throughput.

TierHistory: what was measured. Estimate: how long a tier takes for a byte, with its spread.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from iobench.errors import OptionError
from iobench.remote.journal import DrainEvent
from iobench.units import format_seconds, parse_seconds

__all__ = [
    *("LOCAL", "REMOTE", "Estimate", "Observation", "Placement", "PlacementDecision"),
    *("PlacementGoal", "TierHistory", "choose", "estimate", "failures"),
]

LOCAL, REMOTE = "local", "remote"
"""Names of the tiers in a history."""

_KEPT = 32
_WINDOW = 8
_NOISE, _LEAST_NOISE = math.log(1.1), math.log(1.02)
"""Assumed spread of two transfers, until there are `_ENOUGH` of them to measure it."""
_ENOUGH = 4
_OUTLIER, _LEAST_CHANGE = 3.0, math.log(1.15)
_ERROR = 2.0 * math.sqrt(math.pi / 2)
"""Two standard errors of a median, of one value."""


class Observation(NamedTuple):
    """A transfer of `size_bytes` to a tier, which ended at `at_s` (monotonic seconds).

    It took `elapsed_s` until the bytes were durable. Not `ok`: the tier did not take them.
    """

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


@dataclass(kw_only=True)
class TierHistory:
    """The last 32 transfers `seen` of each tier, oldest first, and the tier chosen last.

    `current` is empty before the first decision, which was at `since_s` of the `clock`. Any thread
    may add a transfer, and a signal handler that saves: an append is one step, and so is a copy.
    """

    seen: dict[str, deque[Observation]] = field(
        default_factory=lambda: {name: deque(maxlen=_KEPT) for name in (LOCAL, REMOTE)}
    )
    current: str = ""
    since_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def add(
        self, tier: str, size_bytes: int, elapsed_s: float, *, ok: bool = True, ago_s: float = 0.0
    ) -> None:
        """Record a transfer that ended `ago_s` seconds ago; not `ok`: it failed."""
        self.seen[tier].append(Observation(self.clock() - ago_s, size_bytes, elapsed_s, ok))

    def recall(self, events: Iterable[DrainEvent]) -> None:
        """Begin with the rates in a journal."""
        now_s = time.time()
        for one in events:
            moved = {"saved": (LOCAL, one.size_bytes), "durable": (REMOTE, one.sent_bytes)}
            tier, size = moved.get(one.event, ("", 0))
            if size and one.elapsed_s > 0:  # the clock may have been set back
                self.add(tier, size, one.elapsed_s, ago_s=max(0.0, now_s - one.at_s))

    def chosen(self, tier: str) -> None:
        """Record a decision."""
        if tier != self.current:
            self.current, self.since_s = tier, self.clock()


def failures(observations: Sequence[Observation]) -> int:
    """Return the number of failed transfers at the end of `observations`."""
    return len(list(itertools.takewhile(lambda one: not one.ok, reversed(observations))))


def estimate(observations: Sequence[Observation]) -> Estimate | None:
    """Return the estimate from the transfers of one tier, oldest first; None without one.

    The logarithms of seconds per byte are compared. The noise is the median difference of two
    transfers that follow each other, which a step change does not alter. Recent is what differs
    from the newest transfers by less than three times the noise: the estimate forgets what was
    before a change, and ignores a single transfer that differs. Nothing before a failure counts.
    The interval is 2 standard errors of the median (1.25 noise / sqrt(count)) wide on each side.
    """
    kept = itertools.takewhile(lambda one: one.ok, reversed(observations))
    newest_first = [math.log(max(one.elapsed_s, 1e-9) / max(one.size_bytes, 1)) for one in kept]
    if not newest_first:
        return None
    noise = _noise(newest_first[: 2 * _WINDOW])
    recent = _recent(newest_first, max(_OUTLIER * noise, _LEAST_CHANGE))
    middle = statistics.median(recent)
    error = _ERROR * noise / math.sqrt(len(recent))
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
    for value in newest_first[1 : 2 * _WINDOW]:
        differs = abs(value - statistics.median(recent)) > tolerance
        if len(recent) == _WINDOW or (differs and differed):
            break
        if not differs:
            recent.append(value)
        differed = differs
    return recent


PlacementGoal = Literal["durable", "bandwidth", "capacity"]

_MARGIN = 1.05
"""A tier that is less than 5% faster is not worth a switch."""
_CONFIRMED = 2
"""Recent transfers of each tier that a switch needs: one slow transfer never switches."""
_PROBE_EVERY = 4
"""After so many transfers of the chosen tier, the other one is measured again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
_LEAST_LIMIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How `choose` decides between local storage and a remote store.

    - `goal`: "durable" takes the tier with the soonest durable copy; "bandwidth" spares the
      network: local storage as long as it works and has room; "capacity" spares local storage
    - `dwell`: the least time between two switches (`"60s"`)

    Raises OptionError for values out of range.
    """

    goal: PlacementGoal = "durable"
    dwell: float | str = "60s"

    def __post_init__(self) -> None:
        if self.goal not in get_args(PlacementGoal):
            raise OptionError(f"goal={self.goal!r}: one of {', '.join(get_args(PlacementGoal))}")
        if self.dwell_s < 0:
            raise OptionError(f"dwell={self.dwell!r}: 0 seconds or more")

    @property
    def dwell_s(self) -> float:
        """The least time between two switches, in seconds."""
        return parse_seconds(self.dwell, "dwell")


@dataclass(frozen=True, kw_only=True)
class PlacementDecision:
    """The tier for the next checkpoint, and why.

    `figures` are the estimates that were compared. `probe` is a tier whose estimate is too old or
    not confirmed: a small transfer to it, after the save, would measure it.
    """

    tier: str
    reason: str
    figures: dict[str, Estimate] = field(default_factory=dict)
    probe: str | None = None

    def limit_s(self, size_bytes: int) -> float | None:
        """Return how long a save may take: as if it were saved to both tiers in turn.

        So a server that does not answer costs at most the time of a good remote save. None: no
        limit, because a tier was not measured yet.
        """
        if len(self.figures) < 2:
            return None
        both_s = sum(one.high for one in self.figures.values()) * size_bytes
        return max(both_s, _LEAST_LIMIT_S)


def choose(
    history: TierHistory,
    placement: Placement,
    *,
    size_bytes: int,
    now_s: float,
    closed: Mapping[str, str] | None = None,
) -> PlacementDecision:
    """Return the tier for a checkpoint of `size_bytes`: a pure function.

    A tier that is `closed`, for the reason there, or whose last transfer failed, is left at once. A
    failed one may be probed after 30 s, and after each further failure twice as late, up to 10
    minutes; it is chosen again when new transfers show that it is faster. Between working tiers a
    switch needs a difference of 5% and intervals that do not overlap, each of two transfers or
    more.
    """
    seen = {name: tuple(found) for name, found in history.seen.items()}
    closed = closed or {}
    failed = {
        name: f"{name} failed {count} times in a row"
        for name, found in seen.items()
        if (count := failures(found))
    }
    problems = {**failed, **closed}
    order = [REMOTE, LOCAL] if placement.goal == "capacity" else [LOCAL, REMOTE]
    usable = [name for name in order if name not in problems]
    why, current = "; ".join(problems.values()), history.current or order[0]
    if not usable:
        tier, reason = order[0], f"no tier is usable: {why}"
    elif placement.goal != "durable":
        tier, reason = usable[0], f"goal {placement.goal}"
        reason += f"; {why}" if why and tier != order[0] else ""
    elif current not in usable:
        tier, reason = usable[0], why
    elif len(usable) == 1:
        tier, reason = current, f"only {current} is usable"
    else:
        tier, reason = _soonest(history, current, placement, size_bytes, now_s)
    (other,) = {LOCAL, REMOTE} - {tier}
    due = other not in closed and _is_due(seen[other], seen[tier], now_s)
    probe = other if due else None
    figures = {name: one for name, found in seen.items() if (one := estimate(found)) is not None}
    return PlacementDecision(tier=tier, reason=reason, figures=figures, probe=probe)


def _soonest(
    history: TierHistory, current: str, placement: Placement, size_bytes: int, now_s: float
) -> tuple[str, str]:
    """Return the tier with the soonest durable copy, as far as it is proved, and why."""
    (other,) = {LOCAL, REMOTE} - {current}
    found = [one for name in (other, current) if (one := estimate(tuple(history.seen[name])))]
    if len(found) < 2 or not _is_faster(*found) or any(one.count < _CONFIRMED for one in found):
        return current, "no difference is proved"
    times = [format_seconds(one.seconds(size_bytes)) for one in found]
    shown = f"{other} takes {times[0]}, {current} {times[1]}"
    if history.current and now_s - history.since_s < placement.dwell_s:
        return current, f"{shown}; the last switch was too recent"
    return other, shown


def _is_faster(fast: Estimate | None, slow: Estimate | None) -> bool:
    return (
        fast is not None
        and slow is not None
        and fast.high < slow.low
        and fast.s_per_byte * _MARGIN < slow.s_per_byte
    )


def _is_due(own: Sequence[Observation], chosen: Sequence[Observation], now_s: float) -> bool:
    """Return whether a tier that was not chosen should be measured."""
    if count := failures(own):
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 20), _LONGEST_PAUSE_S)
        return now_s - own[-1].at_s >= pause_s
    since_s = own[-1].at_s if own else float("-inf")
    newer = sum(one.at_s > since_s for one in chosen)
    unconfirmed = newer > 0 and _is_faster(estimate(own), estimate(chosen))
    return unconfirmed or newer >= _PROBE_EVERY or len(own) < _CONFIRMED
