"""Age order of the checkpoints of a run, by the serial numbers in their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from iobench.checkpoint.damage import damage_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import Checkpoints
from iobench.errors import DataMismatchError, TransferError
from iobench.writers.blocks.workers import map_in_workers

__all__ = ["abandoned_first", "by_age", "in_save_order", "outlines", "readable_manifest"]


def by_age(store: Checkpoints, known: Mapping[int, int] | None = None) -> list[int]:
    """Return the steps of all complete checkpoints, oldest first, last saved at the end.

    `known` has serial numbers by step; manifests of these steps are not read again.
    """
    steps = store.steps()
    if len(steps) < 2:
        return steps
    known = {**store.serials(), **(known or {})}
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
