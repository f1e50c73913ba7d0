"""TuningSizes: the checkpoint sizes of a tuning: small in the race, larger at the end."""

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
    """The requested bytes of each phase.

    `confirm` is chosen from `candidates` when the rates are known. `fits` returns whether the
    workload can be scaled to a size. With `fixed` there is only one candidate.
    """

    confirm: int
    fixed: bool
    fits: Callable[[int], bool]

    def candidates(self) -> Iterator[int]:
        """Yield the present `confirm`, then smaller sizes, each half of the one before."""
        size = self.confirm
        while self.fits(size):
            yield size
            if self.fixed or size // 2 < _LEAST:
                return
            size //= 2

    @property
    def probe(self) -> int:
        """Size of the first, short trials."""
        return self._fitting(min(_PROBE, self.confirm // 4))

    @property
    def small(self) -> int:
        """Size in the race while many settings run."""
        return self._fitting(self.confirm // 4)

    @property
    def large(self) -> int:
        """Size in the race when few settings are left."""
        return self._fitting(self.confirm // 2)

    def _fitting(self, size: int) -> int:
        """Return `size`, doubled until the workload fits; `confirm` at most."""
        while size < self.confirm:
            if self.fits(size):
                return size
            size *= 2
        if not self.fits(self.confirm):
            raise UsageError(f"the workload cannot be scaled to {self.confirm} bytes")
        return self.confirm
