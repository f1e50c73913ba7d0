"""The lag of a remote tier: how long checkpoints have waited for their copies."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.remote.queue import Queued
from iobench.units import format_seconds

__all__ = ["exceeded", "late"]


def exceeded(waiting: Sequence[Queued], max_lag_s: float, now_s: float) -> str:
    """Return by what the oldest of `waiting` exceeds the limit; empty if it does not."""
    age_s = max((now_s - one.since_s for one in waiting), default=0.0)
    if age_s <= max_lag_s:
        return ""
    return f"a copy has waited {format_seconds(age_s)}, {_limit(max_lag_s)}"


def late(waiting: Sequence[Queued], max_lag_s: float, now_s: float) -> list[tuple[Queued, str]]:
    """Return the checkpoints to give up, each with the reason.

    The last saved one, the first of `waiting`, is kept.
    """
    return [
        (one, f"it waited {format_seconds(now_s - one.since_s)}, {_limit(max_lag_s)}")
        for one in waiting[1:]
        if now_s - one.since_s > max_lag_s
    ]


def _limit(max_lag_s: float) -> str:
    return f"max_lag is {format_seconds(max_lag_s)}"
