"""Placement: which tier the next checkpoint is written to, decided by measured throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from iobench.errors import OptionError
from iobench.remote.rates import Estimate, Observation, TierHistory, estimate, failures
from iobench.units import format_seconds, format_size, parse_seconds

__all__ = ["Placement", "PlacementDecision", "PlacementGoal", "TierRoom", "choose"]

PlacementGoal = Literal["durable", "bandwidth", "capacity"]

_MARGIN = 1.05
"""A tier that is less than 5% faster is not worth a switch."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
_LEAST_LIMIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How `choose` decides between local storage and a remote store.

    - `goal`: "durable" takes the tier with the soonest durable copy; "bandwidth" spares the
      network: local storage as long as it works and has room; "capacity" spares local storage
    - `separations`: transfers of each tier that must all confirm a difference before a switch
    - `dwell`: the least time between two switches (`"60s"`)
    - `probe_every`: after so many transfers of the chosen tier, the other one is measured again

    Raises OptionError for values out of range.
    """

    goal: PlacementGoal = "durable"
    separations: int = 2
    dwell: float | str = "60s"
    probe_every: int = 4

    def __post_init__(self) -> None:
        if self.goal not in get_args(PlacementGoal):
            raise OptionError(f"goal={self.goal!r}: one of {', '.join(get_args(PlacementGoal))}")
        for name in ("separations", "probe_every"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise OptionError(f"{name}={value!r}: a whole number, 1 or more")
        if self.dwell_s < 0:
            raise OptionError(f"dwell={self.dwell!r}: 0 seconds or more")

    @property
    def dwell_s(self) -> float:
        """The least time between two switches, in seconds."""
        return parse_seconds(self.dwell, "dwell")


@dataclass(frozen=True, kw_only=True)
class TierRoom:
    """A tier to choose: its name, and its free bytes; None: it has no limit."""

    name: str
    free_bytes: int | None = None


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
    tiers: Sequence[TierRoom],
    placement: Placement,
    *,
    size_bytes: int,
    now_s: float,
) -> PlacementDecision:
    """Return the tier for a checkpoint of `size_bytes`: a pure function.

    `tiers` are local storage and the remote store, in this order. A tier without room, or whose
    last transfer failed, is left at once. A failed one may be probed after 30 s, and after each
    further failure twice as late, up to 10 minutes; it is chosen again when new transfers show that
    it is faster. Between working tiers a switch needs a difference of 5% and intervals that do not
    overlap. This must hold also without the last 1, 2, ... transfers of either tier
    (`separations`), so one slow transfer never switches.
    """
    seen = {tier.name: history.of(tier.name) for tier in tiers}
    full = {
        tier.name: f"{tier.name} has {format_size(tier.free_bytes)} free"
        for tier in tiers
        if tier.free_bytes is not None and tier.free_bytes < size_bytes
    }
    failed = {
        name: f"{name} failed {count} times in a row"
        for name in seen
        if (count := failures(seen[name]))
    }
    problems = failed | full
    order = list(seen)
    current, goal = history.current or order[0], placement.goal
    if goal == "capacity":
        order.reverse()
    usable, why = [name for name in order if name not in problems], "; ".join(problems.values())
    if not usable:
        tier, reason = order[0], f"no tier is usable: {why}"
    elif goal != "durable":
        tier, reason = usable[0], f"goal {goal}"
        reason += f"; {why}" if why and tier != order[0] else ""
    elif current in usable:
        young = bool(history.current) and now_s - history.since_s < placement.dwell_s
        tier, reason = _soonest(seen, usable, current, placement, size_bytes, young)
    else:
        tier, reason = usable[0], why
    others = [name for name in seen if name != tier and name not in full]
    return PlacementDecision(
        tier=tier,
        reason=reason,
        figures={name: found for name in seen if (found := estimate(seen[name])) is not None},
        probe=next((n for n in others if _is_due(seen[n], seen[tier], placement, now_s)), None),
    )


def _soonest(
    seen: Mapping[str, Sequence[Observation]],
    usable: Sequence[str],
    current: str,
    placement: Placement,
    size_bytes: int,
    young: bool,
) -> tuple[str, str]:
    """Return the usable tier with the soonest durable copy, as far as it is proved, and why.

    `young`: the last switch was too recent for another one.
    """
    for name in usable:
        if name == current or not _is_faster(seen[name], seen[current], placement.separations):
            continue
        shown = ", ".join(
            f"{one}{takes} {format_seconds(found.seconds(size_bytes))}"
            for one, takes in ((name, " takes"), (current, ""))
            if (found := estimate(seen[one])) is not None
        )
        return (current, f"{shown}; the last switch was too recent") if young else (name, shown)
    return current, "no difference is proved" if len(usable) > 1 else f"only {current} is usable"


def _is_faster(fast: Sequence[Observation], slow: Sequence[Observation], separations: int) -> bool:
    """Return whether a tier is faster, with any of the last transfers left out."""
    return all(
        _separated(fast[: len(fast) - cut], slow) and _separated(fast, slow[: len(slow) - cut])
        for cut in range(separations)
    )


def _separated(fast: Sequence[Observation], slow: Sequence[Observation]) -> bool:
    one, other = estimate(fast), estimate(slow)
    return (
        one is not None
        and other is not None
        and one.high < other.low
        and one.s_per_byte * _MARGIN < other.s_per_byte
    )


def _is_due(
    own: Sequence[Observation],
    chosen: Sequence[Observation],
    placement: Placement,
    now_s: float,
) -> bool:
    """Return whether a tier that was not chosen should be measured."""
    if count := failures(own):
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 20), _LONGEST_PAUSE_S)
        return now_s - own[-1].at_s >= pause_s
    since_s = own[-1].at_s if own else float("-inf")
    newer = len([one for one in chosen if one.at_s > since_s])
    unconfirmed = newer > 0 and _separated(own, chosen)
    return unconfirmed or newer >= placement.probe_every or len(own) < placement.separations
