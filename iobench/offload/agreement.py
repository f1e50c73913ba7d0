"""Which state all ranks have: pure functions of what each of them offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from iobench.errors import DataMismatchError, UsageError
from iobench.offload.record import GenerationRecord

__all__ = ["GenerationOffer", "chosen", "kept_records"]


@dataclass(frozen=True, kw_only=True)
class GenerationOffer:
    """What one rank has: updates of its generations, and (step, updates) of its pins; newest first.

    Generations of several ranks belong together when they include the same number of updates.
    """

    updates: tuple[int, ...]
    pins: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, records: Sequence[GenerationRecord]) -> Self:
        """Return the offer of a directory with these `records`, the newest first."""
        kept = kept_records(records)
        updates = {one.generation: one.updates for one in kept}
        pins = reversed(kept[0].pins if kept else ())
        return cls(
            updates=tuple(one.updates for one in kept),
            pins=tuple((p.step, updates[p.generation]) for p in pins if p.generation in updates),
        )

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return the offer that `to_json` made."""
        return cls(updates=tuple(found[0]), pins=tuple((step, n) for step, n in found[1]))

    def to_json(self) -> list[Any]:
        """Return it as lists."""
        return [list(self.updates), [list(pin) for pin in self.pins]]


def kept_records(records: Sequence[GenerationRecord]) -> list[GenerationRecord]:
    """Return one record for each generation that training has not abandoned, newest first.

    `records` have the newest first. A training that went back to 5 updates has abandoned older
    records of 6 and more.
    """
    kept: list[GenerationRecord] = []
    for record in records:
        if not record.damaged and (not kept or record.updates < kept[-1].updates):
            kept.append(record)
    return kept


def chosen(
    offers: Sequence[GenerationOffer], wanted: int | Literal["latest", "pinned"], where: str
) -> tuple[int, int | None] | None:
    """Return the updates, and the step of the pin, of the newest state that all ranks have.

    None when "latest" finds none at all. Raises UsageError for a step that is not pinned in all
    ranks, DataMismatchError when the ranks have no generation in common.
    """
    first = offers[0]
    if wanted == "latest":
        common = set(first.updates).intersection(*(one.updates for one in offers))
        if common:
            newest = max(common)
            steps = [pin for pin in first.pins if pin[1] == newest]
            pinned = [step for step, n in steps if all((step, n) in one.pins for one in offers)]
            return newest, pinned[0] if pinned else None
        if any(one.updates for one in offers):
            raise DataMismatchError(
                f"{where}: the ranks have no generation in common: "
                f"{[list(one.updates) for one in offers]} updates"
            )
        return None
    for step, updates in first.pins:
        everywhere = all((step, updates) in one.pins for one in offers)
        if everywhere and wanted in ("pinned", step):
            return updates, step
    both = [step for step, n in first.pins if all((step, n) in one.pins for one in offers)]
    shown = ", ".join(map(str, both)) or "none"
    raise UsageError(f"{where}: step {wanted} is not pinned in all ranks; pinned in all: {shown}")
