"""The sizes nearest to the requested one that a workload can be scaled to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iobench.units import format_size

if TYPE_CHECKING:
    from iobench.workloads import Workload

__all__ = ["nearest_sizes_line"]

_CLOSE = 0.9  # of the requested size
_EXACT = 0.03


def nearest_sizes_line(full: Workload, rank: int, asked_bytes: int) -> str | None:
    """Return a line with the nearest sizes around `asked_bytes`; None if the smaller is close."""
    below = full.scaled(asked_bytes, rank).size_bytes(rank)
    if below >= _CLOSE * asked_bytes or below == full.size_bytes(rank):
        return None
    above = format_size(_above(full, rank, asked_bytes))
    return (
        f"size      {format_size(asked_bytes)} was asked for; the nearest sizes are "
        f"{format_size(below)} and {above}"
    )


def _above(full: Workload, rank: int, asked_bytes: int) -> int:
    """Return the smallest size above `asked_bytes`, by bisection: `scaled` never exceeds a size."""
    low, high, largest = asked_bytes, 2 * asked_bytes, full.size_bytes(rank)
    while (found := full.scaled(high, rank).size_bytes(rank)) <= asked_bytes and found < largest:
        low, high = high, 2 * high
    while high - low > _EXACT * asked_bytes:
        middle = (low + high) // 2
        if full.scaled(middle, rank).size_bytes(rank) > asked_bytes:
            high = middle
        else:
            low = middle
    return full.scaled(high, rank).size_bytes(rank)
