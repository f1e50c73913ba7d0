"""merged: one skeleton from those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iobench.checkpoint.ranked.part import Part
from iobench.checkpoint.ranked.stock_values import own_skeletons
from iobench.checkpoint.tree_spec import json_text
from iobench.errors import StateError

__all__ = ["merged"]

_SHOWN = 60  # characters of a value in a message


def merged(parts: Sequence[Part]) -> Any:
    """Return the skeleton of the state of all ranks, from their parts in rank order.

    Dicts are united: a rank of pipeline parallelism has keys of its own. The values of a PerRank
    are listed by rank. Raises StateError for other differences.
    """
    if all(part.skeleton is None for part in parts[1:]):
        whole = parts[0].skeleton
        others = [part.own for part in parts[1:]]
        for number, own in enumerate(own_skeletons(whole)):
            own += [values[number] for values in others]
        return whole
    return _Merge(len(parts)).of([part.skeleton for part in parts], range(len(parts)), "state")


class _Merge:
    """Unites the skeletons of `count` ranks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def of(self, values: Sequence[Any], ranks: Sequence[int], path: str) -> Any:
        first = values[0]
        if not all(isinstance(value, dict) for value in values):
            if all(isinstance(value, list) and len(value) == len(first) for value in values):
                return [
                    self.of(items, ranks, f"{path}[{number}]")
                    for number, items in enumerate(zip(*values, strict=True))
                ]
            return _same(values, ranks, path)
        tags = {next(iter(value), "") for value in values}
        if tags == {"$per_rank"}:
            if len(values) != self._count:
                raise StateError(
                    f"{path} is a PerRank that some ranks lack; all ranks must have it"
                )
            return {"$per_rank": [value["$per_rank"][0] for value in values]}
        tag = first and next(iter(first))
        if len(tags) == 1 and tag in ("$dict", "$ordered"):
            return {**first, tag: self._pairs([value[tag] for value in values], ranks, path)}
        if len(tags) == 1 and tag == "$tuple":
            return {tag: self.of([value[tag] for value in values], ranks, path)}
        if any(one.startswith("$") for one in tags):
            return _same(values, ranks, path)
        keys = dict.fromkeys(key for value in values for key in value)
        united = {}
        for key in keys:
            have = [at for at, value in enumerate(values) if key in value]
            united[key] = self.of(
                [values[at][key] for at in have], [ranks[at] for at in have], f"{path}[{key!r}]"
            )
        return united

    def _pairs(self, listed: Sequence[Any], ranks: Sequence[int], path: str) -> list[Any]:
        keys = {json_text(key): key for pairs in listed for key, _ in pairs}
        found = [{json_text(key): item for key, item in pairs} for pairs in listed]
        return [
            [
                key,
                self.of(
                    [one[text] for one in found if text in one],
                    [rank for one, rank in zip(found, ranks, strict=True) if text in one],
                    f"{path}[{text}]",
                ),
            ]
            for text, key in keys.items()
        ]


def _same(values: Sequence[Any], ranks: Sequence[int], path: str) -> Any:
    for value, rank in zip(values, ranks, strict=True):
        if value != values[0]:
            raise StateError(
                f"{path} differs between rank {ranks[0]} ({json_text(values[0])[:_SHOWN]}) and "
                f"rank {rank} ({json_text(value)[:_SHOWN]}); wrap it in iobench.PerRank"
            )
    return values[0]
