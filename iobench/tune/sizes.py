"""TuningSizes: how large the checkpoints of a tuning are: small in the race, larger at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iobench.errors import UsageError
from iobench.units import MIB

__all__ = ["TuningSizes"]

_PROBE = 64 * MIB
_LEAST = 16 * MIB


@dataclass(kw_only=True)
class TuningSizes:
    """Bytes asked for by part. `confirm` is chosen, of `candidates`, when the rates are known.

    `fits` says whether the workload can be scaled to a size. With `fixed` there is one candidate.
    """

    confirm: int
    fixed: bool
    fits: Callable[[int], bool]

    def candidates(self) -> Iterator[int]:
        """`confirm` as it is now, then ever smaller sizes, each a half of the one before."""
        size = self.confirm
        while self.fits(size):
            yield size
            if self.fixed or size // 2 < _LEAST:
                return
            size //= 2

    @property
    def probe(self) -> int:
        """Of the first, short trials."""
        return self._fitting(min(_PROBE, self.confirm // 4))

    @property
    def small(self) -> int:
        """Of the race, as long as many run."""
        return self._fitting(self.confirm // 4)

    @property
    def large(self) -> int:
        """Of the race, when few are left."""
        return self._fitting(self.confirm // 2)

    def _fitting(self, size: int) -> int:
        """`size`, or as often doubled as the workload needs to fit."""
        while size < self.confirm:
            if self.fits(size):
                return size
            size *= 2
        if not self.fits(self.confirm):
            raise UsageError(f"the workload cannot be scaled to {self.confirm} bytes")
        return self.confirm
