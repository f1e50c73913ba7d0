"""A TiersPlan whose times are easy to compute by hand."""

from __future__ import annotations

from iobench.tiers.plan import PlannedMemory, TiersPlan
from iobench.units import MIB

__all__ = ["PLAN"]

PLAN = TiersPlan(
    size_bytes=100 * MIB,
    every_s=10,
    saves=3,
    memories=(PlannedMemory(name="memory", size_bytes=200 * MIB, rate_bytes_per_s=100 * MIB),),
    local_rate=25 * MIB,
    remote_rate=20 * MIB,
)
"""100 MiB every 10 s; the copy takes 1 s, the local write 4 s, the copy to the remote tier 5 s."""
