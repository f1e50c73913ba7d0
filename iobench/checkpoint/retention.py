"""Retention: which checkpoints stay, such as `KeepLast(3) | KeepEvery(hours=6)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from iobench.checkpoint.order import abandoned_first
from iobench.errors import OptionError

__all__ = ["KeepAll", "KeepEvery", "KeepLast", "Retention"]


class Retention(ABC):
    """Chooses which complete checkpoints to keep; `a | b` keeps what `a` or `b` keeps."""

    @abstractmethod
    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        """Return the steps to keep. `created_s` maps each step to seconds since the epoch.

        The steps are in the order of their saves. The seconds may decrease when a clock is set
        back.
        """

    def obsolete(self, created_s: Mapping[int, float]) -> list[int]:
        """Return the steps to remove, oldest first. The last saved step is never one of them."""
        kept = self.kept(created_s)
        return [step for step in abandoned_first(list(created_s))[:-1] if step not in kept]

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            return NotImplemented
        return _Either(parts=(self, other))


@dataclass(frozen=True)
class KeepAll(Retention):
    """Keeps every checkpoint."""

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(created_s)


@dataclass(frozen=True)
class KeepLast(Retention):
    """Keeps the newest `count`. Steps that training abandoned are older than all others."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise OptionError(f"KeepLast({self.count!r}): a whole number, 1 or more")

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(abandoned_first(list(created_s))[-self.count :])


@dataclass(frozen=True, kw_only=True)
class KeepEvery(Retention):
    """Keeps the first checkpoint, and then each that is `hours` or `steps` after the last kept one.

    When the clock or the training went back behind the last kept one, the next checkpoint is kept
    and counting restarts from it. A step that was kept once stays kept.
    """

    hours: float = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if not all(type(gap) in (int, float) for gap in (self.hours, self.steps)):
            raise OptionError(f"{self!r}: hours and steps must be numbers")
        if (self.hours > 0) == (self.steps > 0) or self.hours < 0 or self.steps < 0:
            raise OptionError(f"{self!r}: give either hours or steps, above zero")

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        kept: set[int] = set()
        last = 0.0
        for step, created in created_s.items():
            at, gap = (step, self.steps) if self.steps else (created, self.hours * 3600)
            if not kept or at < last or at - last >= gap:
                kept.add(step)
                last = at
        return kept


@dataclass(frozen=True, kw_only=True)
class _Either(Retention):
    parts: tuple[Retention, ...]

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set().union(*(part.kept(created_s) for part in self.parts))
