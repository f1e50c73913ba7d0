"""Which checkpoints stay, such as `KeepLast(3) | KeepEvery(hours=6)`, and which are older.

The age order is that of the serial numbers in their manifests.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import Checkpoints
from iobench.errors import DataMismatchError, OptionError, TransferError
from iobench.writers.blocks.workers import map_in_workers


def damage_of(
    error: DataMismatchError | TransferError, location: str | Path
) -> DataMismatchError | None:
    """Return `error` as damage of the checkpoint; None for other errors, such as a lost network."""
    if isinstance(error, DataMismatchError):
        return error
    unreadable = error.errno == errno.EIO and isinstance(location, Path)  # a bad block of a disk
    return DataMismatchError(str(error)) if error.errno == errno.ENOENT or unreadable else None


def by_age(store: Checkpoints) -> list[int]:
    """Return the steps of all complete checkpoints, oldest first, last saved at the end.

    Only the manifests are read whose serial number `store` does not know.
    """
    steps = store.steps()
    if len(steps) < 2:
        return steps
    known = store.serials()
    serials: dict[int, int | None] = {step: known[step] for step in steps if step in known}
    for step, manifest in outlines(store, [one for one in steps if one not in serials]).items():
        serials[step] = manifest.serial if manifest else None
    return abandoned_first(in_save_order(serials))


def in_save_order(serials: Mapping[int, int | None]) -> list[int]:
    """Return the steps of `serials` in the order of their saves.

    An unknown serial number counts as the number of the next lower step.
    """
    known: dict[int, int] = {}
    below = 0
    for step, serial in sorted(serials.items()):
        below = known[step] = below if serial is None else serial
    return sorted(known, key=lambda step: (known[step], step))


def abandoned_first(saved: Sequence[int]) -> list[int]:
    """Return `saved`, steps in the order of their saves, with abandoned steps moved to the front.

    Training that goes back to step 200 and saves 210 abandons 300. So a step that was saved before
    a lower one is older than all the rest.
    """
    abandoned: list[int] = []
    rest: list[int] = []
    for step in reversed(saved):
        (abandoned if rest and step > rest[-1] else rest).append(step)
    return [*reversed(abandoned), *reversed(rest)]


def outlines(store: Checkpoints, steps: Sequence[int]) -> dict[int, Manifest | None]:
    """Return the manifests of `steps` without their files; None for a damaged or removed one."""
    read = partial(readable_manifest, store, files=False)
    return dict(zip(steps, map_in_workers(store.readers, read, steps), strict=True))


def readable_manifest(store: Checkpoints, step: int, *, files: bool = True) -> Manifest | None:
    """Return the manifest of a checkpoint; None when it is damaged or was removed."""
    try:
        return store.manifest(step, files=files)
    except (DataMismatchError, TransferError) as error:
        if damage_of(error, store.locate(step)) is None:
            raise
        return None


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
