"""Budget: seconds and bytes written that a tuning may spend, counted by its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field

from iobench.errors import OptionError
from iobench.tune.measurement import Measurement
from iobench.units import GIB, format_size_exact

__all__ = ["DEFAULT_BYTES", "DEFAULT_SECONDS", "Budget"]

DEFAULT_SECONDS, DEFAULT_BYTES = 180.0, 60 * GIB


@dataclass(kw_only=True)
class Budget:
    """What may be spent, and what was. No trial begins that is not expected to fit.

    Bytes are known before, so `max_bytes` holds; a last trial may be slower than expected, so
    `max_s` may be exceeded by that much.
    """

    max_s: float = DEFAULT_SECONDS
    max_bytes: int = DEFAULT_BYTES
    spent_s: float = field(default=0.0, init=False)
    written_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.max_s > 0:
            raise OptionError(f"--max-time must be above zero, and is {self.max_s:g}s")
        if not self.max_bytes > 0:
            size = format_size_exact(self.max_bytes)
            raise OptionError(f"--max-bytes must be above zero, and is {size}")

    def spend(self, one: Measurement) -> None:
        self.spent_s += one.spent_s
        self.written_bytes += one.written_bytes

    @property
    def left_s(self) -> float:
        return self.max_s - self.spent_s

    @property
    def left_bytes(self) -> int:
        return self.max_bytes - self.written_bytes
