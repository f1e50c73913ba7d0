"""next_to_write: which waiting snapshot frees the scarcest memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["next_to_write"]


def next_to_write(waiting: Sequence[Mapping[str, int]], free_shares: Mapping[str, float]) -> int:
    """Return the position of the snapshot to write next. A pure function.

    `waiting` has the bytes of each snapshot by tier, oldest snapshot first. `free_shares` has the
    free share of each tier, the fastest tier first. Of the snapshots with the most bytes in the
    tier with the least free share it is the newest one; of tiers with equal shares the fastest one
    counts.
    """
    for tier in sorted(free_shares, key=lambda name: free_shares[name]):  # a stable sort
        held = [parts.get(tier, 0) for parts in waiting]
        if most := max(held):
            return len(held) - 1 - held[::-1].index(most)
    return len(waiting) - 1
