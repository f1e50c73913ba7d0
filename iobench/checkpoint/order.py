"""Age order of the checkpoints of a run, by the serial numbers in their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iobench.checkpoint.damage import damage_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, TransferError

__all__ = ["abandoned_first", "by_age", "in_save_order", "readable_manifest"]


def by_age(store: CheckpointStore, known: Mapping[int, int] | None = None) -> list[int]:
    """Return the steps of all complete checkpoints, oldest first, last saved at the end.

    `known` has serial numbers by step; manifests of these steps are not read again.
    """
    known = known or {}
    steps = store.steps()
    if len(steps) < 2:
        return steps
    return abandoned_first(
        in_save_order(
            {step: known[step] if step in known else _serial(store, step) for step in steps}
        )
    )


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


def _serial(store: CheckpointStore, step: int) -> int | None:
    manifest = readable_manifest(store, step, files=False)
    return manifest.serial if manifest else None


def readable_manifest(store: CheckpointStore, step: int, *, files: bool = True) -> Manifest | None:
    """Return the manifest of a checkpoint; None when it is damaged or was removed."""
    try:
        return store.manifest(step, files=files)
    except (DataMismatchError, TransferError) as error:
        if damage_of(error, store.locate(step)) is None:
            raise
        return None
