"""Paced: a tier that is made slower, for tests and simulation."""

from __future__ import annotations

import time
from dataclasses import dataclass

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.errors import OptionError
from iobench.tiers.local import Local
from iobench.tiers.memory import Memory
from iobench.units import parse_seconds, parse_size
from iobench.writers.image import Bytes

__all__ = ["Paced", "PacedCommitter"]


@dataclass(frozen=True)
class Paced:
    """`tier`, a Memory or Local, at no more than `rate` bytes per second (`"6GiB"`).

    Each copy into the memory, or each write of a checkpoint, takes `latency` longer
    (`"100ms"`). Reads are not slower. Raises OptionError for values out of range.
    """

    tier: Memory | Local
    rate: int | str
    latency: float | str = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.tier, Memory | Local):
            raise OptionError(f"Paced({self.tier!r}): takes a Memory or Local")
        if not self.rate_bytes_per_s:
            raise OptionError("Paced: rate must be at least 1 byte per second")
        if self.latency_s < 0:
            raise OptionError(f"Paced: latency={self.latency!r}: 0 or more")

    @property
    def rate_bytes_per_s(self) -> int:
        """The limit, in bytes per second."""
        return parse_size(self.rate, "rate")

    @property
    def latency_s(self) -> float:
        """Seconds that each copy or write takes longer."""
        return parse_seconds(self.latency, "latency")


@dataclass(frozen=True, kw_only=True)
class PacedCommitter(Committer):
    """Commits through `inner` at the pace of a Paced(Local)."""

    inner: Committer
    pace: Paced

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None = None,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> Manifest:
        time.sleep(self.pace.latency_s)
        own = self.pace.rate_bytes_per_s
        rate = own if rate_bytes_per_s is None else min(own, rate_bytes_per_s)
        return self.inner.commit(save, serialized, memory, rate_bytes_per_s=rate)
