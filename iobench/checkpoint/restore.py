"""Restore of a checkpoint: read it, compare it with its manifest, rebuild the state."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from iobench.checkpoint.compared import compared, read_compared
from iobench.checkpoint.damage import damage_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import by_age, readable_manifest
from iobench.checkpoint.per_rank import PerRank
from iobench.checkpoint.rebuild import readable, unflatten
from iobench.checkpoint.serialized import SKELETON, TENSORS
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import (
    DataMismatchError,
    OptionError,
    StateMismatchError,
    TargetError,
    TransferError,
    UsageError,
)
from iobench.formats import safetensors
from iobench.formats.collector import collector_paused
from iobench.formats.tensors import dtype_name
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = [
    *("FORMAT", "Loaded", "OnCorrupt", "Read"),
    *("candidates", "check_not_offloaded", "read_plain", "restore"),
]

OnCorrupt = Literal["raise", "previous"]

FORMAT = "safetensors"
"""Of the files of a checkpoint that one process saved."""

Read = Callable[[CheckpointStore, Writer, int, Manifest, Any], tuple[Any, Transfer]]
"""Reads the checkpoint of a step with this manifest; the last argument is `like`."""

_OWN = "PerRank"

_MOST_CHANGES = 10  # checkpoints that a trainer may remove under a reader before it gives up


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of a restore: the step, the transfer of its tensors, and the damaged steps.

    `passed_over` maps the step of each damaged checkpoint to its error. The state is not kept here,
    because it may be as large as memory. With `tiers`, `sources` names the tier that it was read
    from, after the nearer ones whose copies could not be read, each with the reason.
    """

    step: int
    transfer: Transfer
    passed_over: dict[int, str]
    sources: dict[str, str] = field(default_factory=dict)


def restore(
    store: CheckpointStore,
    writer: Writer,
    step: int | Literal["latest"],
    *,
    on_corrupt: OnCorrupt = "raise",
    like: Any = None,
    known: Mapping[int, int] | None = None,
    read: Read | None = None,
    offload: Callable[[Manifest], None] | None = None,
) -> tuple[Any, Loaded]:
    """Return the state of the checkpoint `step`, or of the newest one, and how it was restored.

    Before the return every byte is read and compared with the manifest's checksums. A damaged
    checkpoint raises DataMismatchError; with `on_corrupt="previous"` the one before it is restored,
    with a RuntimeWarning. `like` is a state of the expected structure: a checkpoint of another
    model raises StateMismatchError before any tensor is read. Raises TargetError when there is no
    such checkpoint. A checkpoint that a trainer removes or replaces during the read is not damaged:
    for "latest", the newest one is looked up again. `known` has serial numbers by step: of these
    steps only the manifest of a candidate is read. `read` reads one checkpoint, and `offload` lets
    an optimizer go on from the generation that a manifest names.
    """
    if on_corrupt not in ("raise", "previous"):
        raise OptionError(f"on_corrupt={on_corrupt!r}: 'raise' or 'previous'")
    passed_over: dict[int, str] = {}
    left = candidates(store, step, known)
    changes = 0
    while left:
        candidate, *others = left
        manifest = None
        try:
            manifest = store.manifest(candidate)
            if offload is None:
                check_not_offloaded(manifest, str(store))
            state, transfer = (read or read_plain)(store, writer, candidate, manifest, like)
            if offload is not None:
                offload(manifest)
        except (DataMismatchError, TransferError) as error:
            damage = damage_of(error, store.locate(candidate))
            if damage is None:
                raise
            if _is_another_now(store, candidate, manifest):
                changes += 1
                if changes == _MOST_CHANGES:
                    raise TargetError(
                        f"{store}: checkpoints are removed faster than they are read; the trainer "
                        "must keep more of them"
                    ) from error
                found = _candidates_left(store, step, left, known)
                left = [other for other in found if other not in passed_over]
                continue
            if on_corrupt == "raise":
                if others:
                    damage.add_note(
                        f'the checkpoint before it is step {others[0]}; on_corrupt="previous" '
                        "restores the newest one that is not damaged"
                    )
                raise damage from error
            passed_over[candidate] = str(error)
            warnings.warn(f"step {candidate} is skipped: {error}", RuntimeWarning, stacklevel=3)
            left = others
            continue
        return state, Loaded(step=candidate, transfer=transfer, passed_over=passed_over)
    raise DataMismatchError(f"{store}: every checkpoint is damaged: {passed_over}")


def candidates(
    store: CheckpointStore, step: int | Literal["latest"], known: Mapping[int, int] | None
) -> list[int]:
    """Return `step` and the steps before it, newest first."""
    if step == "latest":
        found = by_age(store, known)
        if not found:
            raise TargetError(f"{store}: holds no complete checkpoint")
        return found[::-1]
    steps = store.steps()
    if step not in steps:
        raise TargetError(
            f"{store}: holds no checkpoint of step {step}; it holds {steps or 'none'}"
        )
    return [other for other in reversed(steps) if other <= step]


def check_not_offloaded(manifest: Manifest, where: str) -> None:
    """Raise UsageError for a checkpoint whose optimizer is not in its files."""
    if manifest.pinned:
        raise UsageError(
            f"{where}: step {manifest.step} has its optimizer in {manifest.pinned[0].directory}; "
            "load it with Checkpointer(..., offload=AdamW.resume(parameters, directory))"
        )


def _is_another_now(store: CheckpointStore, step: int, manifest: Manifest | None) -> bool:
    """Return whether a checkpoint was removed or replaced since `manifest` was read.

    `manifest` is None when its read failed.
    """
    return step not in store.steps() or readable_manifest(store, step) != manifest


def _candidates_left(
    store: CheckpointStore,
    step: int | Literal["latest"],
    left: list[int],
    known: Mapping[int, int] | None,
) -> list[int]:
    """Return the remaining candidates after the first one was removed or replaced.

    For "latest" the checkpoints are listed again.
    """
    if step == "latest":
        return candidates(store, step, known)
    present = store.steps()
    if left[0] == step and step not in present:
        raise TargetError(f"{store}: step {step} was removed during the read")
    return [other for other in left if other in present]


def read_plain(
    store: CheckpointStore,
    writer: Writer,
    step: int,
    manifest: Manifest,
    like: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    select: Callable[[Any], Any] = lambda state: state,
) -> tuple[Any, Transfer]:
    """Return the state of the checkpoint that one process saved, and the transfer of its tensors.

    It is for `rank` of `ranks`, see `PerRank`. `select` returns the part of the state that is
    compared with `like` and returned. Raises what `restore` raises.
    """
    if manifest.format != FORMAT:
        raise DataMismatchError(f"{store}: step {step} has the unknown format {manifest.format!r}")
    location = store.locate(step)
    text = read_compared(writer, location, manifest.file(SKELETON))
    tensors, image = safetensors.prepare(TENSORS, location, writer)
    with collector_paused():
        with readable(os.path.join(location, SKELETON)):
            state = unflatten(_parsed(text), tensors, rank=rank, ranks=ranks)
        state = select(state)
    if like is not None:
        _compare(f"{store}: step {step}", like, state)
    record = manifest.file(TENSORS)
    with compared(image, record, os.path.join(location, TENSORS)) as incoming:
        transfer = writer.read(incoming, location)
    return state, transfer


def _parsed(text: bytes) -> Any:
    """Return the skeleton in `text`."""
    with suppress(ValueError, RecursionError):  # such as half of a surrogate pair
        return msgspec.json.decode(text)  # in half of the time of `json`
    return json.loads(text)


def _compare(where: str, like: Any, state: Any) -> None:
    """Raise StateMismatchError unless names, dtypes and shapes of all tensors are equal."""
    if isinstance(like, dict) and isinstance(state, dict):
        state = {key: state[key] for key in like if key in state}
    expected, found = dict(_described(like)), dict(_described(state))
    # Of another world size, a PerRank has other values, or a list of them.
    own = [name for name, what in expected.items() if what == _OWN]
    expected, found = _without(expected, own), _without(found, own)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshaped = {
        name: (expected[name], found[name])
        for name in expected
        if name in found and expected[name] != found[name]
    }
    if missing or unexpected or misshaped:
        raise StateMismatchError(where, missing=missing, unexpected=unexpected, misshaped=misshaped)


def _without(described: dict[str, str], own: list[str]) -> dict[str, str]:
    """Leave out what is at the names `own` or below."""
    inside = tuple(f"{name}." for name in own)
    return {
        name: what
        for name, what in described.items()
        if name not in own and not name.startswith(inside)
    }


def _described(state: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, dtype and shape) of every tensor and array of a state."""
    if isinstance(state, torch.Tensor):
        yield path, f"{dtype_name(state.dtype)} {list(state.shape)}"
    elif isinstance(state, np.ndarray):
        yield path, f"{state.dtype} {list(state.shape)}"
    elif isinstance(state, PerRank):
        yield path, _OWN
    elif isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _described(value, f"{path}.{key}" if path else str(key))
