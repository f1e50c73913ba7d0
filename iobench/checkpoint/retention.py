"""Which checkpoints are kept: `KeepLast(3) | KeepEvery(hours=6)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from iobench.errors import OptionError

__all__ = ["KeepAll", "KeepEvery", "KeepLast", "Retention"]


class Retention(ABC):
    """Chooses among complete checkpoints; `a | b` keeps what either keeps."""

    @abstractmethod
    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        """The steps to keep of those in `created_s`: step -> seconds since the epoch, oldest first.

        The order is that in which they were saved, but for those of steps that training went back
        from: they come before the others.
        """

    def obsolete(self, created_s: Mapping[int, float]) -> list[int]:
        """The steps to remove, oldest first; never the newest one."""
        kept = self.kept(created_s)
        return [step for step in list(created_s)[:-1] if step not in kept]

    def __or__(self, other: Retention) -> Retention:
        return _Either(parts=(self, other))


@dataclass(frozen=True)
class KeepAll(Retention):
    """Nothing is ever removed."""

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(created_s)


@dataclass(frozen=True)
class KeepLast(Retention):
    """The newest `count`."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"KeepLast({self.count}): keeps one at least")

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(list(created_s)[-self.count :])


@dataclass(frozen=True, kw_only=True)
class KeepEvery(Retention):
    """The oldest, and then each that is `hours` or `steps` after the last one so kept."""

    hours: float = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if (self.hours > 0) == (self.steps > 0) or self.hours < 0 or self.steps < 0:
            raise OptionError("KeepEvery takes hours or steps, one of them and above zero")

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        if self.steps:
            return set(_spaced(((step, step) for step in sorted(created_s)), self.steps))
        times = sorted(created_s.items(), key=lambda item: (item[1], item[0]))
        return set(_spaced(times, self.hours * 3600))


def _spaced(places: Iterable[tuple[int, float]], gap: float) -> list[int]:
    kept: list[int] = []
    last = float("-inf")
    for step, at in places:
        if at - last >= gap:
            kept.append(step)
            last = at
    return kept


@dataclass(frozen=True, kw_only=True)
class _Either(Retention):
    parts: tuple[Retention, ...]

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set().union(*(part.kept(created_s) for part in self.parts))
