"""restore: chooses a generation, and gives its parameters to the model."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from iobench.errors import DataMismatchError, StateError, UsageError
from iobench.offload.chunks import ChunkBuffer, read_chunks
from iobench.offload.layout import GenerationRecord, Pin
from iobench.offload.parameters import ShardRanks
from iobench.offload.store import GenerationStore
from iobench.offload.update import flat_view


@dataclass(frozen=True)
class HeldPin:
    """The held pin with this name."""

    name: str


Wanted = int | HeldPin | Literal["latest", "pinned"]
"""The step of a pin, one pin, the newest generation, or the newest pin."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `resume` has loaded."""

    generation: int
    updates: int
    """Calls of `step` that it includes."""
    step: int | None
    """The step of the pin; None for a generation that is not pinned."""
    extra: Any
    """What was given to `pin`."""
    passed_over: tuple[str, ...]
    """Why newer generations were not taken."""


_Key = tuple[str, int]


class _Candidate(NamedTuple):
    record: GenerationRecord
    pin: Pin | None
    kept: bool
    """Whether nothing of it can have been overwritten. If not, all of it is read first."""

    @property
    def key(self) -> _Key:
        """What is the same in all ranks that have a part of it."""
        return self.record.run, self.record.updates


def candidates(
    store: GenerationStore, wanted: Wanted, *, ranked: bool = False
) -> Iterator[_Candidate]:
    """Yield the generations that `wanted` allows, the preferred one first.

    `ranked`: also those that a pin replaced which other ranks may not have. Raises UsageError when
    there is none.
    """
    if isinstance(wanted, HeldPin):
        for pin in store.pins:
            if pin.name == wanted.name:
                yield _Candidate(store.record_of(pin), pin, True)
        return
    if wanted == "latest":
        yield from _latest(store)
        return
    if not isinstance(wanted, int) and wanted != "pinned":
        raise UsageError(f"step={wanted!r}: an int, 'latest' or 'pinned'; {_offer(store)}")
    pins = [_Candidate(store.record_of(pin), pin, True) for pin in reversed(store.pins)]
    if ranked:
        pins += [_Candidate(one, pin, False) for pin, one in store.replaced_pins()]
    if wanted == "pinned":
        yield from pins
        return
    found = [one for one in pins if one.pin is not None and one.pin.step == wanted]
    if not found:
        raise UsageError(f"{store.directory}: step {wanted} is not pinned; {_offer(store)}")
    yield found[0]


def _latest(store: GenerationStore) -> Iterator[_Candidate]:
    pins = {pin.generation: pin for pin in store.pins}
    records = store.records()
    seen: set[int] = set()
    for record in records:
        if record.damaged or record.generation in seen:
            continue
        seen.add(record.generation)
        pin = pins.get(record.generation)
        yield _Candidate(record, pin, pin is not None or record is records[0])


def _offer(store: GenerationStore) -> str:
    newest = store.newest
    latest = f"the newest has {newest.updates} updates" if newest else "there is no generation"
    pins = ", ".join(str(pin.step) for pin in store.pins) or "none"
    return f"pinned: {pins}; {latest}"


def restore(
    store: GenerationStore,
    parameters: Sequence[torch.Tensor],
    wanted: Wanted,
    ranks: ShardRanks,
    *,
    verify: bool,
) -> tuple[GenerationRecord, Restored]:
    """Fill `parameters` from the best generation that all ranks have; the next one follows it.

    With `verify` all bytes are read and compared with their checksums before. A damaged generation
    is passed over with a RuntimeWarning, and marked; an explicit step is not replaced by another.
    Raises DataMismatchError when no generation is left, and TransferError.
    """
    passed: list[str] = []

    def take(one: _Candidate) -> bool:
        try:
            store.check_headers(one.record)
            if verify or not one.kept:
                read_chunks(store, one.record, "state", lambda _: None)
            fill_parameters(store, one.record, parameters)
        except DataMismatchError as error:
            if not one.kept:  # no damage: its slots were used again
                passed.append(f"generation {one.record.generation} was overwritten")
                return False
            passed.append(f"generation {one.record.generation} is damaged: {error}")
            store.mark_damaged(one.record)
            if isinstance(wanted, str):
                warnings.warn(f"{passed[-1]}; an older one is tried", RuntimeWarning, stacklevel=8)
            return False
        return True

    def offered() -> dict[_Key, _Candidate]:
        found: dict[_Key, _Candidate] = {}
        for one in candidates(store, wanted, ranked=ranks.sharded):
            found.setdefault(one.key, one)
        return found

    own = ranks.each(offered)
    steps = {key: one.pin.step if one.pin else None for key, one in own.items()}
    for key, step in ranks.common(steps).items():
        record, pin = own[key].record, own[key].pin if step is not None else None
        taken = ranks.each(functools.partial(take, own[key]))
        if not all(ranks.gather(taken)):
            if taken:
                passed.append(f"generation {record.generation} is damaged in another rank")
            continue
        _go_on(store, record, pin, ranks)
        return record, Restored(
            generation=record.generation,
            updates=record.updates,
            step=step,
            extra=_extra_of(store, pin),
            passed_over=tuple(passed),
        )
    if isinstance(wanted, HeldPin) and not passed:
        raise DataMismatchError(f"{store.directory}: that generation is not pinned any more")
    if not passed:
        all_have = "" if ranks.size == 1 else f" in all {ranks.size} ranks"
        raise UsageError(f"{store.directory}: nothing to restore{all_have}; {_offer(store)}")
    raise DataMismatchError(f"{store.directory}: {'; '.join(passed)}. {_offer(store)}")


def _go_on(
    store: GenerationStore, record: GenerationRecord, pin: Pin | None, ranks: ShardRanks
) -> None:
    """Let the next generation follow `record`. Ranks keep the pins that all have."""
    if not ranks.sharded:
        store.continue_from(record)
        return
    records = [store.record_of(one) for one in store.pins]
    own = {
        (record.run, record.updates, one.step): one
        for record, one in zip(records, store.pins, strict=True)
    }
    common = [own[key] for key in ranks.common(dict.fromkeys(own))]
    if pin is not None and pin not in common:
        common.append(pin)
    store.rewind(record, common[-store.layout.pins :])


def saved_extra(extra: Any) -> bytes:
    """Return the bytes of what was given to `pin`. Raises StateError if `resume` cannot load it."""
    file = io.BytesIO()
    torch.save(extra, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        raise StateError(
            f"extra cannot be loaded again with weights_only: {str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()


def _extra_of(store: GenerationStore, pin: Pin | None) -> Any:
    """Return what was given to `pin`. Without its own record, the generation is still good."""
    if pin is None or pin.name:
        return None
    record = store.record_of(pin)
    if record.sequence != pin.sequence:
        warnings.warn(
            f"{store.directory}: the record of the pin of step {pin.step} is damaged; its state is "
            "whole and is taken, without its extra",
            RuntimeWarning,
            stacklevel=6,
        )
        return None
    return torch.load(io.BytesIO(record.extra), weights_only=True) if record.extra else None


def fill_parameters(
    store: GenerationStore,
    record: GenerationRecord,
    parameters: Sequence[torch.Tensor],
) -> None:
    """Give the values of a generation to the contiguous tensors `parameters`."""

    def deliver(buffer: ChunkBuffer) -> None:
        with torch.no_grad():
            for piece in store.layout.pieces(buffer.chunk):
                value = flat_view(parameters[piece.parameter])[piece.begin : piece.end]
                value.copy_(buffer.parameter(piece))

    read_chunks(store, record, "parameters", deliver)
