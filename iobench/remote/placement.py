"""Placement: which tier the next checkpoint is written to, decided by measured throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from iobench.errors import OptionError
from iobench.remote.rates import Estimate, Observation, estimate, failures
from iobench.units import format_seconds, format_size, parse_seconds

__all__ = [
    "Placement",
    "PlacementDecision",
    "PlacementGoal",
    "TierHistory",
    "TierRoom",
    "choose",
    "direct_limit_s",
]

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
    figures = {
        tier.name: found for tier in tiers if (found := estimate(history.of(tier.name))) is not None
    }
    usable = [tier.name for tier in tiers if _unusable(history, tier, size_bytes) is None]
    current = history.current or tiers[0].name
    if current in usable and placement.goal == "durable":
        tier, reason = _soonest(history, usable, current, placement, size_bytes, now_s)
    else:
        tier, reason = _first(history, tiers, usable, current, placement, size_bytes)
    return PlacementDecision(
        tier=tier,
        reason=reason,
        figures=figures,
        probe=_to_probe(history, tiers, tier, placement, size_bytes, now_s),
    )


def direct_limit_s(
    placement: Placement, decision: PlacementDecision, size_bytes: int
) -> float | None:
    """Return how long a direct save may take: as if it were saved to both tiers in turn.

    So a server that does not answer costs at most the time of a good remote save. None: no limit.
    """
    figures = decision.figures.values()
    if placement.goal != "durable" or len(figures) < 2:
        return None
    return max(sum(one.high for one in figures) * size_bytes, _LEAST_LIMIT_S)


def _unusable(history: TierHistory, tier: TierRoom, size_bytes: int) -> str | None:
    """Return why the tier cannot take the checkpoint; None if it can."""
    if tier.free_bytes is not None and tier.free_bytes < size_bytes:
        return f"{tier.name} has {format_size(tier.free_bytes)} free"
    count = failures(history.of(tier.name))
    return f"{tier.name} failed {count} times in a row" if count else None


def _first(
    history: TierHistory,
    tiers: Sequence[TierRoom],
    usable: Sequence[str],
    current: str,
    placement: Placement,
    size_bytes: int,
) -> tuple[str, str]:
    """Return the tier that the goal prefers among the usable ones, and the reason."""
    order = [tier.name for tier in tiers]
    if placement.goal == "capacity":
        order.reverse()
    problems = [why for tier in tiers if (why := _unusable(history, tier, size_bytes))]
    if not usable:
        return order[0], f"no tier is usable: {'; '.join(problems)}"
    tier = next(name for name in order if name in usable)
    if placement.goal == "durable" and current not in usable:
        return tier, "; ".join(problems)
    reason = f"goal {placement.goal}"
    return tier, f"{reason}; {'; '.join(problems)}" if problems and tier != order[0] else reason


def _soonest(
    history: TierHistory,
    usable: Sequence[str],
    current: str,
    placement: Placement,
    size_bytes: int,
    now_s: float,
) -> tuple[str, str]:
    """Return the usable tier with the soonest durable copy, as far as it is proved."""
    for name in usable:
        if name == current or not _is_faster(history, name, current, placement.separations):
            continue
        fast, slow = estimate(history.of(name)), estimate(history.of(current))
        assert fast is not None
        assert slow is not None
        shown = (
            f"{name} takes {format_seconds(fast.seconds(size_bytes))}, {current} "
            f"{format_seconds(slow.seconds(size_bytes))}"
        )
        if history.current and now_s - history.since_s < placement.dwell_s:
            return current, f"{shown}; the last switch was too recent"
        return name, shown
    return current, "no difference is proved" if len(usable) > 1 else f"only {current} is usable"


def _is_faster(history: TierHistory, name: str, than: str, separations: int) -> bool:
    """Return whether `name` is faster, with any of the last transfers left out."""
    fast, slow = history.of(name), history.of(than)
    cuts = [
        (0, 0),
        *((n, 0) for n in range(1, separations)),
        *((0, n) for n in range(1, separations)),
    ]
    return all(
        _separated(fast[: len(fast) - fast_cut], slow[: len(slow) - slow_cut])
        for fast_cut, slow_cut in cuts
    )


def _separated(fast: Sequence[Observation], slow: Sequence[Observation]) -> bool:
    one, other = estimate(fast), estimate(slow)
    return (
        one is not None
        and other is not None
        and one.high < other.low
        and one.s_per_byte * _MARGIN < other.s_per_byte
    )


def _to_probe(
    history: TierHistory,
    tiers: Sequence[TierRoom],
    chosen: str,
    placement: Placement,
    size_bytes: int,
    now_s: float,
) -> str | None:
    """Return a tier that is not chosen and should be measured."""
    for tier in tiers:
        if tier.name == chosen:
            continue
        if tier.free_bytes is not None and tier.free_bytes < size_bytes:
            continue
        own = history.of(tier.name)
        count = failures(own)
        if count:
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(count - 1, 20), _LONGEST_PAUSE_S)
            if now_s - own[-1].at_s >= pause_s:
                return tier.name
            continue
        since = own[-1].at_s if own else float("-inf")
        newer = sum(one.at_s > since for one in history.of(chosen))
        unconfirmed = _separated(own, history.of(chosen))
        if (
            newer >= placement.probe_every
            or (unconfirmed and newer)
            or len(own) < placement.separations
        ):
            return tier.name
    return None
