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

    `confirm` is chosen from `candidates` when the rates are known, and so is the race's `part` of
    it. `fits` returns whether the workload can be scaled to a size. With `fixed` there is only one
    candidate.
    """

    confirm: int
    fixed: bool
    fits: Callable[[int], bool]
    part: int = 8

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
        return self.probe_bytes(self.confirm)

    @property
    def small(self) -> int:
        """Size in the race while many settings run."""
        return self.race_bytes(self.confirm, self.part)

    @property
    def large(self) -> int:
        """Size in the race when few settings are left."""
        return self.race_bytes(self.confirm, self.part // 2)

    def probe_bytes(self, confirm: int) -> int:
        """Return the size of a probe before a confirmation at `confirm`."""
        return self._fitting(min(_PROBE, confirm // 4), confirm)

    def race_bytes(self, confirm: int, part: int) -> int:
        """Return the size of a race before a confirmation at `confirm`, for one of its parts."""
        return self._fitting(max(self.probe_bytes(confirm), confirm // part), confirm)

    def _fitting(self, size: int, most: int) -> int:
        """Return `size`, doubled until the workload fits; `most` at most."""
        while size < most:
            if self.fits(size):
                return size
            size *= 2
        if not self.fits(most):
            raise UsageError(f"the workload cannot be scaled to {most} bytes")
        return most
