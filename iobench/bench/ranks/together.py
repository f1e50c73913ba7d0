"""What the ranks of a run found on their machines, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from iobench.results.records import Stored

__all__ = ["all_true", "over_ranks"]


def over_ranks(stored: Stored, others: Sequence[Stored | None]) -> Stored:
    """Return `stored` of rank 0's machine with the dirty pages of all other ranks' machines.

    Where one machine cannot count them, the sum is unknown unless the others have some already.
    """
    found = [one for one in others if one is not None]
    known = [one.unsynced_bytes for one in (stored, *found) if one.unsynced_bytes is not None]
    total = sum(known)
    unseen = next((one.unseen for one in (stored, *found) if one.unseen), "")
    return replace(
        stored,
        unsynced_bytes=None if unseen and not total else total,
        unseen=unseen,
        ignored_syncs=next(
            (one.ignored_syncs for one in (stored, *found) if one.ignored_syncs), ""
        ),
    )


def all_true(values: Iterable[bool | None]) -> bool | None:
    """Return False if one value is, else None if one is unknown, else True."""
    found = list(values)
    if False in found:
        return False
    return None if None in found else True
