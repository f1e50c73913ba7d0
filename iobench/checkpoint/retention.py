"""Which checkpoints are kept: `KeepLast(3) | KeepEvery(hours=6)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from iobench.checkpoint.order import by_line
from iobench.errors import OptionError

__all__ = ["KeepAll", "KeepEvery", "KeepLast", "Retention"]


class Retention(ABC):
    """Chooses among complete checkpoints; `a | b` keeps what either keeps."""

    @abstractmethod
    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        """The steps to keep of those in `created_s`, which maps steps to seconds since the epoch.

        They come in the order in which they were saved. The seconds may go back from one to the
        next: clocks are set.
        """

    def obsolete(self, created_s: Mapping[int, float]) -> list[int]:
        """The steps to remove, oldest first; never the one saved last."""
        kept = self.kept(created_s)
        return [step for step in by_line(list(created_s))[:-1] if step not in kept]

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            return NotImplemented
        return _Either(parts=(self, other))


@dataclass(frozen=True)
class KeepAll(Retention):
    """Nothing is ever removed."""

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(created_s)


@dataclass(frozen=True)
class KeepLast(Retention):
    """The newest `count`. Steps that training went back from are older than all others."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise OptionError(f"KeepLast({self.count!r}): a whole number, 1 or more")

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return set(by_line(list(created_s))[-self.count :])


@dataclass(frozen=True, kw_only=True)
class KeepEvery(Retention):
    """The first one saved, and then each that is `hours` or `steps` after the last one so kept.

    Where the clock or the training went back behind the last one kept, the next one is kept and
    counting starts again from it. A step that was kept once stays kept.
    """

    hours: float = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if not all(type(gap) in (int, float) for gap in (self.hours, self.steps)):
            raise OptionError(f"{self!r}: hours and steps are numbers")
        if (self.hours > 0) == (self.steps > 0) or self.hours < 0 or self.steps < 0:
            raise OptionError("KeepEvery takes hours or steps, one of them and above zero")

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
