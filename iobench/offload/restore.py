"""restore: chooses a generation, and gives its parameters to the model."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from iobench.errors import DataMismatchError, StateError, UsageError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.chunks import read_chunks
from iobench.offload.groups import kind_of, put_values, specs_of
from iobench.offload.model import flat_view
from iobench.offload.record import GenerationRecord, Pin
from iobench.offload.store import GenerationStore

__all__ = [
    *("HeldPin", "Restored", "Wanted"),
    *("candidates", "fill_parameters", "open_state", "restore", "saved_extra"),
]


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
    """What was given to `pin`; None if its file is damaged, with a RuntimeWarning."""
    passed_over: tuple[str, ...]
    """Why newer generations were not taken."""


class _Candidate(NamedTuple):
    record: GenerationRecord
    pin: Pin | None
    kept: bool
    """Whether nothing of it can have been overwritten. If not, all of it is read first."""


def candidates(store: GenerationStore, wanted: Wanted) -> Iterator[_Candidate]:
    """Yield the generations that `wanted` allows, the preferred one first.

    Raises UsageError when there is none.
    """
    pins = {pin.generation: pin for pin in store.pins}
    records = store.records()
    if isinstance(wanted, HeldPin):
        for pin in store.pins:
            if pin.held is not None and pin.held.name == wanted.name:
                yield _Candidate(store.record_of(pin), pin, True)
        return
    if isinstance(wanted, int):
        found = [pin for pin in reversed(store.pins) if pin.step == wanted]
        if not found:
            raise UsageError(f"{store.directory}: step {wanted} is not pinned; {_offer(store)}")
        yield _Candidate(store.record_of(found[0]), found[0], True)
        return
    if wanted not in ("latest", "pinned"):
        raise UsageError(f"step={wanted!r}: an int, 'latest' or 'pinned'; {_offer(store)}")
    if wanted == "pinned":
        for pin in reversed(store.pins):
            yield _Candidate(store.record_of(pin), pin, True)
        return
    seen: set[int] = set()
    for record in records:
        if record.damaged or record.generation in seen:
            continue
        seen.add(record.generation)
        pin_or_none = pins.get(record.generation)
        kept = pin_or_none is not None or record is records[0]
        yield _Candidate(record, pin_or_none, kept)


def _offer(store: GenerationStore) -> str:
    newest = store.newest
    latest = f"the newest has {newest.updates} updates" if newest else "there is no generation"
    pins = ", ".join(str(pin.step) for pin in store.pins) or "none"
    return f"pinned: {pins}; {latest}"


def open_state(
    directory: Path,
    groups: Sequence[dict[str, Any]],
    kind: str,
    wanted: Wanted,
    *,
    verify: bool,
    iodepth: int,
    block_size: int,
) -> tuple[GenerationStore, Restored]:
    """Open the state of an optimizer of this `kind`; fill its parameters and groups.

    Raises what `restore` raises, StateMismatchError for another model, UsageError for another kind.
    """
    specs = specs_of(groups)
    store = GenerationStore.open(directory)
    try:
        store.layout.check_same(specs, str(directory))
        found = store.newest and kind_of(store.newest.groups[0])
        if found and found != kind:
            raise UsageError(f"{store.directory} has the state of {found}: use its resume")
        parameters = [parameter for group in groups for parameter in group["params"]]
        record, restored = restore(
            store, parameters, wanted, verify=verify, iodepth=iodepth, block_size=block_size
        )
        put_values(groups, record.groups)
    except BaseException:
        store.close()
        raise
    return store, restored


def restore(
    store: GenerationStore,
    parameters: Sequence[torch.Tensor],
    wanted: Wanted,
    *,
    verify: bool,
    iodepth: int,
    block_size: int,
) -> tuple[GenerationRecord, Restored]:
    """Fill `parameters` from the best generation, and let the next one follow it.

    With `verify` all bytes are read and compared with their checksums before. A damaged generation
    is passed over with a RuntimeWarning, and marked; an explicit step is not replaced by another.
    Raises DataMismatchError when no generation is left, and TransferError.
    """
    speed = {"iodepth": iodepth, "block_size": block_size}
    passed: list[str] = []
    for record, pin, kept in candidates(store, wanted):
        try:
            store.check_headers(record)
            if verify or not kept:
                read_chunks(store, record, "state", lambda _: None, **speed)
            fill_parameters(store, record, parameters, **speed)
        except DataMismatchError as error:
            if not kept:  # no damage: its slots were used again
                passed.append(f"generation {record.generation} was overwritten")
                continue
            passed.append(f"generation {record.generation} is damaged: {error}")
            store.mark_damaged(record)
            if not isinstance(wanted, str):
                break
            warnings.warn(f"{passed[-1]}; an older one is tried", RuntimeWarning, stacklevel=4)
            continue
        store.continue_from(record)
        return record, Restored(
            generation=record.generation,
            updates=record.updates,
            step=pin.step if pin else None,
            extra=_extra_of(store, pin),
            passed_over=tuple(passed),
        )
    if isinstance(wanted, HeldPin) and not passed:
        raise DataMismatchError(f"{store.directory}: that generation is not pinned any more")
    if not passed:
        raise UsageError(f"{store.directory}: nothing to restore; {_offer(store)}")
    raise DataMismatchError(f"{store.directory}: {'; '.join(passed)}. {_offer(store)}")


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
    """Return what was given to `pin`. If its file is damaged, the generation is still good."""
    try:
        extra = store.extra(pin) if pin is not None and pin.held is None else None
    except DataMismatchError as error:
        warnings.warn(
            f"{error}; the state of step {pin.step if pin else None} is whole and is taken, "
            "without its extra",
            RuntimeWarning,
            stacklevel=6,
        )
        return None
    return None if extra is None else torch.load(io.BytesIO(extra), weights_only=True)


def fill_parameters(
    store: GenerationStore,
    record: GenerationRecord,
    parameters: Sequence[torch.Tensor],
    *,
    iodepth: int,
    block_size: int,
) -> None:
    """Give the values of a generation to the contiguous tensors `parameters`."""

    def deliver(buffer: ChunkBuffer) -> None:
        with torch.no_grad():
            for piece in store.layout.pieces(buffer.chunk):
                value = flat_view(parameters[piece.parameter])[piece.begin : piece.end]
                value.copy_(buffer.parameter(piece))

    read_chunks(store, record, "parameters", deliver, iodepth=iodepth, block_size=block_size)
