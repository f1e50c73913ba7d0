"""LagLimit: how far the remote tier may be behind, in age and in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iobench.tiers.queue import Queued
from iobench.units import format_seconds, format_size

__all__ = ["LagLimit"]


@dataclass(frozen=True, kw_only=True)
class LagLimit:
    """The most that the checkpoints that wait for their copies may have.

    `age_s` limits the wait of the oldest one, `size_bytes` their sum; None: no limit. All methods
    are pure functions of the clock `now_s` and of `waiting`, the last saved checkpoint first.
    """

    age_s: float
    size_bytes: int | None = None

    def half(self) -> LagLimit:
        """Return the limit of half the age and half the bytes."""
        size = self.size_bytes
        return LagLimit(age_s=self.age_s / 2, size_bytes=None if size is None else size // 2)

    def exceeded(self, waiting: Sequence[Queued], now_s: float) -> str:
        """Return by what the limit is exceeded; empty if it is not."""
        if not waiting:
            return ""
        age_s, size = now_s - min(one.since_s for one in waiting), _bytes_of(waiting)
        if age_s > self.age_s:
            return f"a copy has waited {format_seconds(age_s)}, {self._age()}"
        if self.size_bytes is not None and size > self.size_bytes:
            return f"{format_size(size)} wait for copies, {self._size()}"
        return ""

    def no_room(self, waiting: Sequence[Queued], size_bytes: int, now_s: float) -> str:
        """Return why one more checkpoint of `size_bytes` may not wait; empty if it may.

        The only one may always wait.
        """
        if not waiting or self.size_bytes is None:
            return self.exceeded(waiting, now_s)
        total = _bytes_of(waiting) + size_bytes
        if total > self.size_bytes:
            return f"{format_size(total)} would wait for copies, {self._size()}"
        return self.exceeded(waiting, now_s)

    def late(self, waiting: Sequence[Queued], now_s: float) -> list[tuple[Queued, str]]:
        """Return the checkpoints to give up, each with the reason. The newest one is kept."""
        found: list[tuple[Queued, str]] = []
        size = _bytes_of(waiting[:1])
        for one in waiting[1:]:
            age_s, size = now_s - one.since_s, size + one.size_bytes
            if age_s > self.age_s:
                found.append((one, f"it waited {format_seconds(age_s)}, {self._age()}"))
            elif self.size_bytes is not None and size > self.size_bytes:
                why = f"{format_size(size)} waited for copies, {self._size()}"
                found.append((one, why))
        return found

    def _age(self) -> str:
        return f"max_lag is {format_seconds(self.age_s)}"

    def _size(self) -> str:
        return f"max_lag_size is {format_size(self.size_bytes or 0)}"


def _bytes_of(waiting: Sequence[Queued]) -> int:
    return sum(one.size_bytes for one in waiting)
