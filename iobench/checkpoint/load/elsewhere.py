"""Loads of ranks whose states have different keys, as in pipeline parallelism.

Each rank gets the tensors of its own `like`. What only the `like` of another rank has is neither
read nor returned here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from iobench.checkpoint.load.like import tensors_of
from iobench.checkpoint.ranked.stock_values import StatePath, name_of
from iobench.errors import StateMismatchError
from iobench.ranks.together import Together

__all__ = ["paths_elsewhere", "without"]


def paths_elsewhere(together: Together, rank: int, like: Any) -> frozenset[StatePath]:
    """Return the paths of the tensors in the `like` of other ranks, as far as they differ.

    All ranks call it. Ranks with equal paths send them once.
    """

    def own() -> list[StatePath] | None:
        return None if like is None else [path for path, _ in tensors_of(like)]

    paths, digests = together("keys of like", own, _digest)
    if len(set(digests)) == 1:
        return frozenset()
    first = digests.index(digests[rank]) == rank
    _, every = together("tensors of like", lambda: (paths if first else None) or [])
    return frozenset(tuple(path) for one in every for path in one).difference(paths or ())


def _digest(paths: list[StatePath] | None) -> str | None:
    if paths is None:
        return None
    return hashlib.sha256(json.dumps(sorted(map(list, paths), key=str)).encode()).hexdigest()


def without(state: Any, like: Any, gone: Collection[StatePath], where: str) -> Any:
    """Return `state` without the tensors at the paths `gone`.

    What has tensors in a dict, all of them gone, and no place in `like`, is left out whole. Raises
    StateMismatchError for a tensor in a list: the others would get other positions.
    """
    if not gone:
        return state
    found, _, _ = _without(state, like, gone, where, ())
    return found


def _without(
    value: Any, like: Any, gone: Collection[StatePath], where: str, path: StatePath
) -> tuple[Any, bool, bool]:
    """Return the value, whether it has tensors, and whether it had others that are gone."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value, path not in gone, path in gone
    if isinstance(value, dict):
        inner = like if isinstance(like, dict) else {}
        keeps = lost = False
        for key in list(value):
            place = (*path, str(key))
            item, has, had = _without(value[key], inner.get(key), gone, where, place)
            if had and not has and (key not in inner or place in gone):
                del value[key]
            else:
                value[key] = item
            keeps, lost = keeps or has, lost or had
        return value, keeps, lost
    if type(value) in (list, tuple):
        others = like if isinstance(like, list | tuple) and len(like) == len(value) else value
        items = []
        for number, (one, other) in enumerate(zip(value, others, strict=True)):
            place = (*path, number)
            if place in gone:
                raise StateMismatchError(where, missing=[], unexpected=[name_of(place)])
            items.append(_without(one, other, gone, where, place))
        kept = type(value)(item for item, _, _ in items)
        return kept, any(has for _, has, _ in items), any(had for _, _, had in items)
    return value, False, False
