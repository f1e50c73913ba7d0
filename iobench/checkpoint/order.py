"""Which checkpoint of a run is older: by the serial numbers in their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iobench.checkpoint.damage import damage_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, TransferError

__all__ = ["as_saved", "by_age", "by_line", "readable_manifest"]


def by_age(store: CheckpointStore, known: Mapping[int, int] | None = None) -> list[int]:
    """The steps of all complete checkpoints, the one that was saved last at the end.

    `known` has serial numbers of some, whose manifests are not read again.
    """
    known = known or {}
    steps = store.steps()
    if len(steps) < 2:
        return steps
    return by_line(
        as_saved({step: known[step] if step in known else _serial(store, step) for step in steps})
    )


def as_saved(serials: Mapping[int, int | None]) -> list[int]:
    """The steps of `serials` in the order in which they were saved.

    An unknown number counts as that of the step below it.
    """
    known: dict[int, int] = {}
    below = 0
    for step, serial in sorted(serials.items()):
        below = known[step] = below if serial is None else serial
    return sorted(known, key=lambda step: (known[step], step))


def by_line(saved: Sequence[int]) -> list[int]:
    """The steps in `saved`, which are in the order of their saves, with abandoned ones moved first.

    Training that goes back to step 200 and saves 210 abandons 300: a step that was saved before a
    lower one is older than all the rest.
    """
    abandoned: list[int] = []
    rest: list[int] = []
    for step in reversed(saved):
        (abandoned if rest and step > rest[-1] else rest).append(step)
    return [*reversed(abandoned), *reversed(rest)]


def _serial(store: CheckpointStore, step: int) -> int | None:
    manifest = readable_manifest(store, step)
    return manifest.serial if manifest else None


def readable_manifest(store: CheckpointStore, step: int) -> Manifest | None:
    """The manifest of a checkpoint; None where it is damaged, or gone by now."""
    try:
        return store.manifest(step)
    except (DataMismatchError, TransferError) as error:
        if damage_of(error, store.locate(step)) is None:
            raise
        return None
