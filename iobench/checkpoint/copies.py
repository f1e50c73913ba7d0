"""Copy: one copy of a checkpoint in a tier, and how safe it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Copy", "CopyState"]

CopyState = Literal[
    "volatile", "durable", "waiting", "draining", "verified", "superseded", "failed"
]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of a checkpoint in the tier `tier`: "memory", or the location of local or remote.

    - `volatile`: in memory; it is lost with this process
    - `waiting`, `draining`: not in this tier yet; `eta_s` is when it is expected there, in seconds
      from now, or None when no rate was measured yet
    - `durable`: complete and visible in this tier
    - `verified`: durable, and read back from this tier with correct checksums
    - `superseded`: it is not copied to this tier; a newer one is
    - `failed`: the local files are damaged, so they are not copied

    `durable_at_s` is when this process made it durable in the remote tier, in seconds since the
    epoch.
    """

    tier: str
    state: CopyState
    eta_s: float | None = None
    durable_at_s: float | None = field(default=None, compare=False)
