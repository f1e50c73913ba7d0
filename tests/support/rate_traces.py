"""Rates of a local and a remote tier over time, and saves that a placement decides about."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from iobench.remote.drain import pause_after
from iobench.remote.placement import PlacementGoal, TierHistory, choose, failures
from iobench.units import GIB

Rate = Callable[[float], float]
"""Bytes per second at a time in seconds; 0 when the tier is dead."""

SAVES, EVERY_S, SIZE_BYTES = 300, 60.0, 10 * GIB
LENGTH_S = SAVES * EVERY_S
_ERROR_S = 5.0  # until a dead tier is known to be dead
_PROBE = 64  # a probe has this part of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Rates of both tiers, and how often the faster one changes for good, from local on."""

    local: Rate
    remote: Rate
    changes: int


def _always(gib_per_s: float) -> Rate:
    return lambda _: gib_per_s * GIB


def _step(before: float, after: float, at: float = 0.5) -> Rate:
    return lambda time_s: (before if time_s < at * LENGTH_S else after) * GIB


def _alternating(one: float, other: float, period_s: float) -> Rate:
    return lambda time_s: (other if int(time_s / period_s) % 2 else one) * GIB


def _drift(begin: float, end: float) -> Rate:
    return lambda time_s: begin * (end / begin) ** (time_s / LENGTH_S) * GIB


def _bursts(rate: float, low: float, every_s: float, length_s: float) -> Rate:
    """A neighbour takes most of the link for `length_s`, at moments that shift by 37 s a time."""

    def found(time_s: float) -> float:
        shifted = (time_s + int(time_s / every_s) * 37) % every_s
        return (low if shifted < length_s else rate) * GIB

    return found


def _dead(rate: float, begin: float, end: float) -> Rate:
    return lambda time_s: 0.0 if begin * LENGTH_S < time_s < end * LENGTH_S else rate * GIB


TRACES = {
    "steady, local faster": Trace(local=_always(2), remote=_always(1), changes=0),
    "steady, remote faster": Trace(local=_always(1), remote=_always(2), changes=1),
    "steady, equal": Trace(local=_always(1.5), remote=_always(1.5), changes=0),
    "remote drops": Trace(local=_always(1), remote=_step(2.5, 0.5), changes=2),
    "remote rises": Trace(local=_always(1), remote=_step(0.5, 2.5), changes=1),
    "local drops": Trace(local=_step(2.5, 0.5), remote=_always(1), changes=1),
    "local rises": Trace(local=_step(0.5, 2.5), remote=_always(1), changes=2),
    "slow drift up": Trace(local=_always(1), remote=_drift(0.5, 2), changes=1),
    "slow drift down": Trace(local=_always(1), remote=_drift(2, 0.5), changes=2),
    "flapping every 50 saves": Trace(
        local=_always(1), remote=_alternating(0.6, 1.6, LENGTH_S / 6), changes=5
    ),
    "flapping within each save": Trace(
        local=_always(1), remote=_alternating(2.2, 0.4, 2.3), changes=1
    ),
    "bursts": Trace(local=_always(1.2), remote=_bursts(1.5, 0.3, 170, 8), changes=1),
    "dead": Trace(local=_always(1), remote=_dead(2, 1 / 3, 1), changes=2),
    "dead and back": Trace(local=_always(1), remote=_dead(2, 1 / 3, 2 / 3), changes=3),
}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Total seconds to durable, those of the oracle, and the tiers switched to."""

    total_s: float
    oracle_s: float
    switches: list[str]
    reasons: list[str]


def _seconds(rate: Rate, begin_s: float, size_bytes: float) -> float | None:
    """Return how long `size_bytes` take from `begin_s` on; None if the tier is dead."""
    left, now_s = size_bytes, begin_s
    while left > 1:
        if (found := rate(now_s)) <= 0:
            return None
        tick_s = min(0.5, left / found)
        left, now_s = left - found * tick_s, now_s + tick_s
    return now_s - begin_s


def replay(trace: Trace, goal: PlacementGoal, *, noise: float, seed: int = 0) -> Replay:
    """Save every 60 s where `choose` says, and drain local checkpoints to the remote tier.

    The oracle knows the rates during each save, and not the random noise of single transfers.
    """
    random_ = random.Random(seed)
    rates = {"local": trace.local, "remote": trace.remote}
    history, failed_s = TierHistory(), 0.0
    total_s = oracle_s = 0.0
    switches: list[str] = []
    reasons: list[str] = []

    def moved(tier: str, now_s: float, size_bytes: float) -> float | None:
        took_s = _seconds(rates[tier], now_s, size_bytes)
        return None if took_s is None else took_s * math.exp(random_.gauss(0, noise))

    def observe(tier: str, took_s: float | None, size_bytes: int) -> None:
        history.add(tier, size_bytes, took_s or _ERROR_S, ok=took_s is not None)

    for number in range(SAVES):
        now_s = number * EVERY_S
        found = choose(history, goal, size_bytes=SIZE_BYTES)
        if found.tier != history.current:
            if history.current:
                switches.append(found.tier)
                reasons.append(found.reason)
            history.current = found.tier
        known = {name: _seconds(rate, now_s, SIZE_BYTES) for name, rate in rates.items()}
        took = {name: moved(name, now_s, SIZE_BYTES) for name in rates}
        best = min((took_s, name) for name, took_s in known.items() if took_s is not None)[1]
        oracle_s += took[best] or 0.0
        took_s = took[found.tier]
        observe(found.tier, took_s, SIZE_BYTES)
        end_s = now_s + (took_s or _ERROR_S)
        if took_s is None:  # the other tier takes it
            other = "local" if found.tier == "remote" else "remote"
            observe(other, took[other], SIZE_BYTES)
            end_s += took[other] or 0.0
        total_s += end_s - now_s
        if found.probe:
            size_bytes = SIZE_BYTES // _PROBE
            observe("local", moved("local", end_s, size_bytes), size_bytes)
        if found.tier == "local":  # the drain copies it, with its pauses after failures
            count = failures(history.seen["remote"])
            if not count or end_s - failed_s >= pause_after(count):
                copy_s = moved("remote", end_s, SIZE_BYTES)
                failed_s = end_s if copy_s is None else failed_s
                observe("remote", copy_s, SIZE_BYTES)
    return Replay(total_s=total_s, oracle_s=oracle_s, switches=switches, reasons=reasons)
