"""Which state all ranks have: pure functions of what each of them offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from iobench.errors import DataMismatchError, UsageError
from iobench.offload.record import GenerationRecord, Pin, StateName

__all__ = ["Common", "GenerationOffer", "chosen", "kept_records", "offered_records", "passed_over"]

Common = tuple[StateName, int | None]
"""A state that all ranks have, and the step of its pin if all have that too."""


@dataclass(frozen=True, kw_only=True)
class GenerationOffer:
    """What one rank has. Parts of several ranks belong together when they have the same name."""

    states: tuple[StateName, ...]
    """Its generations, the newest first, and then the other pinned ones."""
    pins: tuple[tuple[int, StateName], ...]
    """Steps and states of its pins in the same order."""
    only_tentative: bool = False
    """Whether it has nothing that counts by itself."""

    @classmethod
    def of(cls, records: Sequence[GenerationRecord]) -> Self:
        """Return the offer of a directory with these `records`, the newest first."""
        found = offered_records(records)
        place = {one.generation: at for at, one in enumerate(found)}
        pins = [one for one in _pins(records) if one.generation in place]
        pins.sort(key=lambda one: place[one.generation])
        return cls(
            states=tuple(one.name for one in found),
            pins=tuple((one.step, found[place[one.generation]].name) for one in pins),
            only_tentative=bool(found) and all(one.tentative for one in found),
        )

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return the offer that `to_json` made."""
        states, pins, only_tentative = found
        return cls(
            states=tuple(StateName(*one) for one in states),
            pins=tuple((step, StateName(*one)) for step, one in pins),
            only_tentative=only_tentative,
        )

    def to_json(self) -> list[Any]:
        """Return it as lists."""
        pins = [[step, list(one)] for step, one in self.pins]
        return [[list(one) for one in self.states], pins, self.only_tentative]


def kept_records(records: Sequence[GenerationRecord]) -> list[GenerationRecord]:
    """Return one record for each generation that training has not abandoned, newest first.

    `records` have the newest first. A training that went back to 5 updates has abandoned older
    records of 6 and more. A tentative record abandons none; it is returned if it is the newest.
    """
    kept: list[GenerationRecord] = []
    least: int | None = None
    for record in records:
        if record.damaged or (least is not None and record.updates >= least):
            continue
        if not record.tentative:
            least = record.updates
        elif kept:
            continue
        kept.append(record)
    return kept


def offered_records(records: Sequence[GenerationRecord]) -> list[GenerationRecord]:
    """Return the kept records, newest first, and then those of pins that training has abandoned.

    A load may have gone back to such a pin in other ranks. Older versions named no history, so
    their abandoned pins cannot be distinguished from others with as many updates.
    """
    found = kept_records(records)
    for pin in _pins(records):
        same = [one for one in records if one.generation == pin.generation and not one.damaged]
        if same and same[0].history and same[0].name not in [one.name for one in found]:
            found.append(same[0])
    return found


def _pins(records: Sequence[GenerationRecord]) -> Sequence[Pin]:
    """The pins, the newest first."""
    return records[0].pins[::-1] if records else ()


def chosen(
    offers: Sequence[GenerationOffer], wanted: int | Literal["latest", "pinned"], where: str
) -> Common | None:
    """Return the newest state that all ranks have, or that of a pin.

    None when "latest" finds none at all. Raises UsageError for a step that is not pinned in all
    ranks, DataMismatchError when the ranks have no generation in common.
    """
    first = offers[0]
    if wanted == "latest":
        for state in first.states:
            if all(state in one.states for one in offers):
                steps = [step for step, name in first.pins if name == state]
                pinned = [s for s in steps if all((s, state) in one.pins for one in offers)]
                return state, pinned[0] if pinned else None
        if any(one.states and not one.only_tentative for one in offers):
            raise DataMismatchError(
                f"{where}: the ranks have no generation in common: "
                f"{[[state.updates for state in one.states] for one in offers]} updates"
            )
        return None
    for step, state in first.pins:
        everywhere = all((step, state) in one.pins for one in offers)
        if everywhere and wanted in ("pinned", step):
            return state, step
    both = [step for step, state in first.pins if all((step, state) in one.pins for one in offers)]
    shown = ", ".join(map(str, both)) or "none"
    raise UsageError(f"{where}: step {wanted} is not pinned in all ranks; pinned in all: {shown}")


def passed_over(offers: Sequence[GenerationOffer], state: StateName) -> str:
    """Return a warning for ranks that go on from `state`, or "" if no rank is far ahead of it.

    A rank may be one generation ahead of another after any crash.
    """
    newer = [
        f"rank {rank} has {', '.join(str(one.updates) for one in offer.states[:at])}"
        for rank, offer in enumerate(offers)
        if (at := offer.states.index(state)) > 1
    ]
    if not newer:
        return ""
    return (
        f"the ranks go on from update {state.updates}, the newest state that all of them have; "
        f"newer ones of a different history are abandoned: {'; '.join(newer)} updates"
    )
